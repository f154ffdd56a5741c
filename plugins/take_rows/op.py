"""take_rows: consecutive rows of each slot, from a start per slot."""

import torch
from torch import Tensor


@torch.library.custom_op("mtpbuild::take_rows", mutates_args=())
def take_rows(x: Tensor, start: Tensor, count: int) -> Tensor:
    """Take `count` rows of x [B, N, ..] from start [B] on -> [B, count, ..]; all must exist."""
    index = start[:, None]
    if count > 1:
        index = index + torch.arange(count, device=x.device)
    index = index.reshape(*index.shape, *[1] * (x.dim() - 2))
    return x.gather(1, index.expand(-1, -1, *x.shape[2:]))


@take_rows.register_fake
def _(x: Tensor, start: Tensor, count: int) -> Tensor:
    return x.new_empty(start.shape[0], count, *x.shape[2:])
