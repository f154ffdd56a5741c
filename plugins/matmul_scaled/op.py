"""matmul_scaled: x @ W for a weight of e4m3 or e2m1 values with a scale per block of inputs.

A weight [K, N], or experts [X, K, N], lies as a plain one does, inputs first:

fp8: values uint8 [K, N] are e4m3, scales fp32 [K / 128, N].
nvfp4: values uint8 [K / 2, N] are two e2m1, the low nibble first; scales uint8 [K / 16, N] are
e4m3; scales_2 fp32 [1, N], or [K / 16, 1] where weights are joined by their inputs.

The number of blocks says how large they are; of 128 the last one may be smaller.
"""

import torch
from torch import Tensor

BLOCK = 128


@torch.library.custom_op("mtpbuild::matmul_scaled", mutates_args=())
def matmul_scaled(
    x: Tensor, values: Tensor, scales: Tensor, scales_2: Tensor | None = None
) -> Tensor:
    """x [.., K] and a weight [K, N] -> [.., N] in x's type, which the weight is rounded to."""
    return x @ dequantise(values, scales, scales_2).to(x.dtype)


@matmul_scaled.register_fake
def _(x: Tensor, values: Tensor, scales: Tensor, scales_2: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], values.shape[-1])


@torch.library.custom_op("mtpbuild::dequantise_scaled", mutates_args=())
def dequantise_scaled(values: Tensor, scales: Tensor, scales_2: Tensor | None = None) -> Tensor:
    """A weight in fp32; rounded once."""
    return dequantise(values, scales, scales_2)


@dequantise_scaled.register_fake
def _(values: Tensor, scales: Tensor, scales_2: Tensor | None = None) -> Tensor:
    *stack, rows, N = values.shape
    return scales.new_empty(*stack, inputs_of(rows, scales_2), N, dtype=torch.float32)


def inputs_of(rows: int, scales_2: Tensor | None) -> int:
    """K of values with so many rows."""
    return rows if scales_2 is None else 2 * rows


def block_size(K: int, blocks: int) -> int:
    return BLOCK if blocks == -(-K // BLOCK) else K // blocks


def dequantise(values: Tensor, scales: Tensor, scales_2: Tensor | None = None) -> Tensor:
    """A weight as the op takes it -> fp32 [.., K, N]."""
    K = inputs_of(values.shape[-2], scales_2)
    if scales_2 is None:
        return e4m3(values) * spread(scales, K)
    pairs = torch.stack([values & 0xF, values >> 4], dim=-2)
    exact = e2m1(pairs.flatten(-3, -2)) * spread(e4m3(scales), K)  # 2 by 4 bits
    return exact * spread(scales_2, K)


def spread(scales: Tensor, K: int) -> Tensor:
    """One per block [.., K / block, N] -> one per input."""
    blocks = scales.shape[-2]
    if blocks == 1:
        return scales
    return scales.repeat_interleave(block_size(K, blocks), dim=-2).narrow(-2, 0, K)


def e4m3(codes: Tensor) -> Tensor:
    return _small_floats(codes, 4, 3)


def e2m1(codes: Tensor) -> Tensor:
    return _small_floats(codes, 2, 1)


def _small_floats(codes: Tensor, exponent: int, mantissa: int) -> Tensor:
    """uint8 -> fp32, as fp16 of a shorter exponent: not every GPU and compiler has the types."""
    bits, bias = exponent + mantissa, (1 << exponent - 1) - 1
    codes = codes.to(torch.int16)
    sign, size = codes >> bits, codes & (1 << bits) - 1
    return (sign << 15 | size << 10 - mantissa).view(torch.float16).float() * 2.0 ** (15 - bias)
