"""matmul_nbits: x @ W for an int8 or int4 weight with one scale per block of 32 inputs."""

import torch
from torch import Tensor

from mtpbuild.plugins.definition import define

BLOCK = 32


@define(lambda x, values: x.new_empty(*x.shape[:-1], values.shape[0]))
def matmul_nbits(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """Multiply x [.., K] by a weight of uint8 values [N, K / 32, bytes] and scales [N, K / 32].

    A block of 32 bytes holds int8 with zero at 128; a block of 16 bytes holds int4 with zero at 8,
    the low nibble first. Scales are fp32 or fp16; the result [.., N] is fp32. A target may round x
    to int8 per row and block.
    """
    return x @ dequantise(values, scales, bits_of(values.shape[-1])).T


def dequantise(values: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Convert values [.., blocks, bytes] and scales [.., blocks] to fp32 [.., K]."""
    if bits == 4:
        values = torch.stack([values & 0xF, values >> 4], dim=-1).flatten(-2)
    return ((values.float() - (1 << bits - 1)) * scales.float()[..., None]).flatten(-2)


def bits_of(width: int) -> int:
    """Return the bits per weight for blocks of `width` bytes."""
    return width * 8 // BLOCK
