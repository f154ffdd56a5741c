"""balance_streams for AOTInductor on a CPU: sums are products with ones.

It would write each sum of N numbers out, and in it those of the round before, and so on.
"""

import torch
from torch import Tensor

from mtpbuild.plugins.mix_streams.op import split_scaled


def balance_streams_inductor(
    numbers: Tensor, base: Tensor, scale: Tensor, streams: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute the op."""
    pre, post, comb = split_scaled(numbers, base, scale, streams)
    ones = comb.new_ones(streams, streams)
    comb = comb.softmax(-1) + eps
    comb = comb / (ones @ comb + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb @ ones + eps)
        comb = comb / (ones @ comb + eps)
    return pre.sigmoid() + eps, torch.cat([2 * post.sigmoid(), comb.flatten(-2)], dim=-1)
