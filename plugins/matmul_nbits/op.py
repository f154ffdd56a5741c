"""matmul_nbits: x @ W for a weight in blocks of 32 columns, int8 or int4, an fp32 scale each."""

import torch
from torch import Tensor

BLOCK = 32


@torch.library.custom_op("mtpbuild::matmul_nbits", mutates_args=())
def matmul_nbits(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """x [.., K] with uint8 values [N, K / 32, bytes] and scales [N, K / 32] -> [.., N].

    32 bytes per block: int8, zero at 128. 16: int4, zero at 8, the low nibble first. A target may
    round x to int8 per row and block too.
    """
    return x @ dequantise(values, scales).T


matmul_nbits.register_fake(lambda x, values, _: x.new_empty(*x.shape[:-1], values.shape[0]))


def dequantise(values: Tensor, scales: Tensor) -> Tensor:
    """values [N, blocks, 32 or 16] and scales [N, blocks] -> fp32 [N, K]."""
    bits = bits_of(values.shape[-1])
    if bits == 4:
        values = torch.stack([values & 0xF, values >> 4], dim=-1).flatten(2)
    return ((values.float() - (1 << bits - 1)) * scales[..., None]).flatten(1)


def bits_of(width: int) -> int:
    """Of blocks with so many bytes."""
    return width * 8 // BLOCK
