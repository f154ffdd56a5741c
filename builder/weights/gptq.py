"""GPTQ (arXiv:2210.17323): round a weight so that its product with known inputs changes least.

Columns are rounded in turn. The error of each is made good by the columns after it, by as much as
their inputs are correlated in the calibration texts.
"""

from mtpbuild.builder.formats.integers import BLOCK, Integers
from mtpbuild.builder.lazy_torch import Tensor, torch

DAMPING = 0.01  # of the inputs' mean square, added to each input's


def correct_errors(sums: Tensor) -> Tensor:
    """Return by how much [K, K] each column makes good the errors of the columns before it.

    sums: the upper triangle of the sum H of x x^T [K, K] over inputs x; its diagonal is damped in
    place. With H = R R^T and R upper triangular, errors e change the product by |R^T e|^2, and the
    i-th term of it is R[i, i] e_i + sum over j < i of R[j, i] e_j. So column i makes good
    R[j, i] / R[i, i] of e_j. This is GPTQ without an inverse (arXiv:2507.18553). An input that is
    always 0 gets no share of any error.
    """
    mean = sums.diagonal().mean().clamp(min=1e-30)
    sums.diagonal()[sums.diagonal() == 0] = mean
    for power in range(6):
        sums.diagonal().add_(DAMPING * 10**power * mean)
        factor, failed = torch.linalg.cholesky_ex(sums.flip(0, 1))
        if not failed:
            factor = factor.flip(0, 1)
            return factor.div_(factor.diagonal().clone())
    raise AssertionError("a matrix with so large a diagonal is positive definite")


def encode_calibrated(format: Integers, weight: Tensor, shares: Tensor) -> dict[str, Tensor]:
    """Encode rows of a weight [N, K] with the result of `correct_errors` for its inputs.

    A block's scale is the one of least squared error for the best answer of its columns to the
    errors of all columns before the block.
    """
    left = weight.T.clone(memory_format=torch.contiguous_format)  # [K, N], and then the errors
    codes = torch.empty(left.shape, dtype=torch.uint8)
    scales = torch.empty(len(left) // BLOCK, weight.shape[0], dtype=torch.float16)
    for start in range(0, len(left), BLOCK):
        end = start + BLOCK
        diagonal = shares[start:end, start:end]
        owed = shares[:start, start:end].T @ left[:start]  # [BLOCK, N]: what errors ask for
        answer = torch.linalg.solve_triangular(diagonal.T, owed, upper=False, unitriangular=True)
        block = (left[start:end] + answer).T.contiguous()
        scale = scales[start // BLOCK] = format.fit_scales(block).squeeze(-1)
        for i, column in enumerate(left[start:end]):
            code = codes[start + i] = format.codes(column + owed[i], scale)
            column -= (code.float() - format.zero) * scale.float()
            owed[i + 1 :].addr_(diagonal[i, i + 1 :], column)
    return format.collect(codes.T, scales.T.contiguous())
