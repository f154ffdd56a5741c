"""take_rows: consecutive rows of each slot, from the slot's own start on."""

import torch
from torch import Tensor

from mtpbuild.plugins.definition import Node, define


@define(
    lambda x, start, count: x.new_empty(start.shape[0], count, *x.shape[2:]),
    Node("Take", typed="x"),
)
def take_rows(x: Tensor, start: Tensor, count: int) -> Tensor:
    """Take `count` rows of x [B, N, ..] from start [B] on -> [B, count, ..]; all must exist."""
    index = start[:, None]
    if count > 1:
        index = index + torch.arange(count, device=x.device)
    index = index.reshape(*index.shape, *[1] * (x.dim() - 2))
    return x.gather(1, index.expand(-1, -1, *x.shape[2:]))
