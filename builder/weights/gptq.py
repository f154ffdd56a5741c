"""GPTQ (arXiv:2210.17323): round a weight so that its product with known inputs changes least.

Columns are rounded in turn. The error of each is made good by the columns after it, by as much as
their inputs are correlated in the calibration texts.
"""

from __future__ import annotations  # Tensor is imported for types alone

from typing import TYPE_CHECKING

from mtpbuild.builder.formats.integers import BLOCK, Integers
from mtpbuild.builder.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

DAMPING = 0.01  # of the inputs' mean square, added to each input's
SPAN = 4 * BLOCK  # columns whose errors the columns after them get together


def correct_errors(hessian: Tensor) -> Tensor:
    """Return the triangular factor U [K, K] that says what later columns make good of an error.

    hessian: the sum of x x^T [K, K] over inputs x, which is damped in place until U^T U is its
    inverse. An input that is always 0 gets no share of any error.
    """
    mean = hessian.diagonal().mean().clamp(min=1e-30)
    hessian.diagonal()[hessian.diagonal() == 0] = mean
    for power in range(6):
        hessian.diagonal().add_(DAMPING * 10**power * mean)
        factor, failed = torch.linalg.cholesky_ex(hessian)
        if not failed:
            inverse = torch.cholesky_inverse(factor)
            factor, failed = torch.linalg.cholesky_ex(inverse, upper=True)
        if not failed:
            return factor
    raise AssertionError("a matrix with so large a diagonal is positive definite")


def encode_calibrated(format: Integers, weight: Tensor, factor: Tensor) -> dict[str, Tensor]:
    """Encode rows of a weight [N, K] with the result of `correct_errors` for its inputs.

    A block has the scale of least squared error for what its columns are when their turn comes.
    """
    left = weight.T.contiguous()  # [K, N]: what is left to round
    codes = torch.empty(left.shape, dtype=torch.uint8)
    scales = torch.empty(len(left) // BLOCK, weight.shape[0], dtype=format.scales)
    for start in range(0, len(left), SPAN):
        end = min(start + SPAN, len(left))
        errors = torch.empty(end - start, weight.shape[0])
        for k in range(start, end):
            if k % BLOCK == 0:
                block = left[k : k + BLOCK].T.contiguous()
                scale = scales[k // BLOCK] = format.fit_scales(block).squeeze(-1)
            codes[k] = format.codes(left[k], scale)
            value = (codes[k].float() - format.zero) * scale.float()
            error = errors[k - start] = (left[k] - value) / factor[k, k]
            left[k + 1 : end].addr_(factor[k, k + 1 : end], error, alpha=-1)
        left[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return format.collect(codes.T, scales.T)
