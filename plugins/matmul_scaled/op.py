"""matmul_scaled: x @ W for a weight of e4m3 or e2m1 values with a scale per block of inputs.

A weight [K, N], or a stack of experts [X, K, N], has its inputs first, like an unquantised one:

fp8: values uint8 [K, N] contain e4m3; scales fp32 [K / block, N]. A block usually has 128 inputs.
nvfp4: values uint8 [K / 2, N] contain two e2m1 each, the low nibble first; scales uint8 [K / 16, N]
contain e4m3; scales_2 fp32 [1, N], or [K / 16, 1] for weights that were joined along their inputs.
"""

import torch
from torch import Tensor

from mtpbuild.plugins.definition import define

MAX_TOKENS = 64  # of the kernel: with more, dequantising the whole weight in memory is faster


@define(lambda x, values: x.new_empty(*x.shape[:-1], values.shape[-1]))
def matmul_scaled(
    x: Tensor, values: Tensor, scales: Tensor, scales_2: Tensor | None = None
) -> Tensor:
    """Multiply x [.., K] by a weight [K, N], which is dequantised and rounded to x's type."""
    return x @ dequantise(values, scales, scales_2).to(x.dtype)


def dequantise(values: Tensor, scales: Tensor, scales_2: Tensor | None = None) -> Tensor:
    """Convert a weight in the module's layout to fp32 [.., K, N]."""
    blocks = values.unflatten(-2, (scales.shape[-2], -1))  # [.., blocks, block, N]
    if scales_2 is None:
        return (e4m3(blocks) * scales.unsqueeze(-2)).flatten(-3, -2)
    nibble = torch.arange(0, 8, 4, dtype=torch.uint8, device=values.device)[:, None]
    pairs = blocks.unsqueeze(-2) >> nibble & 0xF  # [.., blocks, 8, 2, N]
    exact = e2m1(pairs) * e4m3(scales)[..., None, None, :]  # 2 times 4 bits of mantissa
    return (exact * scales_2[..., None, None, :]).flatten(-4, -2)


def e4m3(codes: Tensor) -> Tensor:
    return _floats(codes, 4, 3)


def e2m1(codes: Tensor) -> Tensor:
    return _floats(codes, 2, 1)


def _floats(codes: Tensor, exponent: int, mantissa: int) -> Tensor:
    """Convert uint8 codes to fp32 by integer operations: some compilers and GPUs lack the types."""
    bits, bias = exponent + mantissa, (1 << exponent - 1) - 1
    size = codes.int() & (1 << bits) - 1
    normal = ((size << 23 - mantissa) + (127 - bias << 23)).view(torch.float32)
    subnormal = size.float() * 2.0 ** (1 - bias - mantissa)
    magnitude = torch.where(size < 1 << mantissa, subnormal, normal)
    return torch.where(codes < 1 << bits, magnitude, -magnitude)
