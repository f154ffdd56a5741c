"""causal_conv: a depthwise convolution over a slot's tokens, and silu."""

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("mtpbuild::causal_conv", mutates_args=())
def causal_conv(x: Tensor, tail: Tensor, weight: Tensor) -> Tensor:
    """Returns silu(sum over j of weight[j] * input t - k + 1 + j) for x [B, T, C], all fp32.

    tail [B, k - 1, C] has the inputs before x; weight is [k, C]. Terms are added in the order of j.
    """
    tokens, inputs = x.shape[1], torch.cat([tail, x], dim=1)
    y = inputs[:, :tokens] * weight[0]
    for j in range(1, weight.shape[0]):
        y = y + inputs[:, j : tokens + j] * weight[j]
    return F.silu(y)


causal_conv.register_fake(lambda x, tail, weight: torch.empty_like(x))
