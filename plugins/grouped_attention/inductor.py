"""grouped_attention in AOTInductor, without the copy that joins cache and fresh rows."""

import torch
from torch import Tensor

from mtpbuild.plugins.mla_attention.inductor import attend_apart
from mtpbuild.plugins.mla_attention.op import seen_apart


def grouped_attention_inductor(
    q: Tensor, cache: Tensor, fresh: Tensor, base: Tensor, first: Tensor, scale: float, groups: int
) -> Tensor:
    """Compute the reference's result; the heads of a group are rows of one product."""
    (B, H, T, D), S = q.shape, cache.shape[2]
    rows = (q * scale).reshape(B, groups, -1, D)  # [B, G, H / G * T, D]
    (old_k, old_v), (new_k, new_v) = (_heads(block, groups) for block in (cache, fresh))
    committed, visible = seen_apart(S, fresh.shape[2], base, first, T)  # [B, 1, S], [B, T, F]
    masks = committed[:, None], visible.repeat(1, H // groups, 1)[:, None]
    mixed = attend_apart(rows, (old_k, new_k), (old_v, new_v), masks, torch.float32)
    return mixed.reshape(B, H, T, D)


def _heads(rows: Tensor, groups: int) -> list[Tensor]:
    """Split rows [B, 1, S, 2 G D] into keys and values, each [B, G, S, D]."""
    halves = rows[:, 0].chunk(2, dim=-1)
    return [half.unflatten(-1, (groups, -1)).transpose(1, 2) for half in halves]
