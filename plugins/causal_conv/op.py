"""causal_conv, a depthwise convolution over a slot's tokens, and last_inputs, its new state."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpbuild.plugins.definition import Node, define
from mtpbuild.plugins.take_rows.op import take_rows


@define(lambda x: torch.empty_like(x), Node("CausalConv"))
def causal_conv(x: Tensor, tail: Tensor, weight: Tensor) -> Tensor:
    """Return silu(sum over j of weight[j] * input[t - k + 1 + j]) for x [B, T, C], all fp32.

    tail [B, k - 1, C]: the inputs before x. weight [k, C]. Terms are added in the order of j.
    """
    tokens = x.shape[1]
    inputs = torch.cat([tail, x], dim=1)
    y = inputs[:, :tokens] * weight[0]
    for j in range(1, weight.shape[0]):
        y = y + inputs[:, j : tokens + j] * weight[j]
    return F.silu(y)


@define(lambda tail: torch.empty_like(tail), Node("LastInputs"))
def last_inputs(tail: Tensor, inputs: Tensor, n: Tensor) -> Tensor:
    """Return the k inputs before token n [B] of `inputs` [B, T, C], which follow tail [B, k, C]."""
    return take_rows(torch.cat([tail, inputs], dim=1), n, tail.shape[1])
