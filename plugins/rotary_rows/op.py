"""rotary_rows: compute once the angles and row numbers that all layers of a pass read."""

import torch
from torch import Tensor

from mtpbuild.plugins.definition import Node, define


def empty_places(start: Tensor, inv_freq: Tensor, tokens: int) -> tuple[Tensor, ...]:
    """Return empty tensors like the results."""
    cos = inv_freq.new_empty(start.shape[0], tokens, inv_freq.shape[0])
    like = torch.empty_like
    return cos, like(cos), like(start), like(start), like(start)


@define(empty_places, Node("Places", sizes=("tokens", "end")))
def rotary_rows(
    start: Tensor,
    active: Tensor | None,
    inv_freq: Tensor,
    tokens: int,
    offset: int,
    end: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Place `tokens` tokens of each slot at the positions from start [B] + offset on.

    A slot that is not active ([B] bool) is placed at `end`, and its base is 0. Returns five
    tensors: cos and sin [B, tokens, R / 2] fp32 of position * inv_freq [R / 2], times scale; base
    [B], the number of cache rows that all tokens see; place [B], the cache row to which the first
    fresh row is written; and first [B], the last fresh row that the first token sees (the offset).
    """
    base, place = start.clone(), start.clone()
    if active is not None:
        base, place = torch.where(active, start, 0), torch.where(active, start, end)
    positions = place[:, None] + offset + torch.arange(tokens, device=start.device)
    angles = positions[..., None].float() * inv_freq
    first = torch.full_like(start, offset)
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    return cos, sin, base, place, first
