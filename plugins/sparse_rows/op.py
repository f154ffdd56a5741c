"""index_keys and choose_rows: an indexer scores all rows for each token and chooses the best.

Source: DeepSeek-V3.2, section 2.1. Its Hadamard rotation, which does not change the products, and
its rounding to fp8 are left out: scores are fp32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpbuild.plugins.definition import Node, define
from mtpbuild.plugins.rope.op import rope

NONE = -1  # padding for a token that sees fewer rows than it may choose


@define(lambda a: torch.empty_like(a), Node("IndexKeys", renamed={"eps": "epsilon"}))
def index_keys(
    a: Tensor, weight: Tensor, bias: Tensor, cos: Tensor, sin: Tensor, eps: float, interleaved: bool
) -> Tensor:
    """Apply a LayerNorm with weight and bias [D] to a [B, T, D], and rotate it.

    cos, sin [B, T, R / 2] fp32 rotate the first R of D values, as `rope` does.
    """
    return rope(F.layer_norm(a, weight.shape, weight, bias, eps), cos, sin, 1, interleaved)


@define(
    lambda q, weights, count: q.new_empty(*weights.shape[:2], count, dtype=torch.int64),
    Node("ChooseRows"),
)
def choose_rows(
    q: Tensor,
    weights: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    fresh: Tensor,
    base: Tensor,
    first: Tensor,
    count: int,
    interleaved: bool,
) -> Tensor:
    """Choose the `count` rows with the highest scores for each token: positions [B, T, count].

    q [B, T, H D] has a query for each of H heads, whose first R values are rotated by cos, sin
    [B, T, R / 2]; weights [B, T, H] fp32. The last D values of each row are its key. cache
    [B, 1, S, C], fresh [B, 1, F, C], base and first [B] int: token t of slot b sees the rows
    j < base[b] of the cache and the fresh rows i <= first[b] + t, whose positions are base[b] + i.
    A row's score is the sum over heads of weight H^-0.5 relu(D^-0.5 query . key), in fp32.

    Positions are int64 in rising order, padded with `NONE`. Ties go to the lowest position, so that
    the choice depends neither on the window nor on a prompt's chunks.
    """
    (S, fresh_rows), (T, heads) = (cache.shape[2], fresh.shape[2]), weights.shape[1:]
    size = q.shape[-1] // heads
    q = rope(q, cos, sin, heads, interleaved).unflatten(-1, (heads, size)).float()
    keys = torch.cat([rows[:, 0, :, -size:].float() for rows in (cache, fresh)], dim=1)
    raw = (q.flatten(1, 2) @ keys.mT).unflatten(1, (T, heads))  # [B, T, H, S + F]
    scaled = weights.float()[..., None] * heads**-0.5 * (raw * size**-0.5).relu()
    place = torch.arange(S + fresh_rows, device=q.device)
    last = S + first[:, None] + torch.arange(T, device=q.device)  # [B, T]
    seen = (place < base[:, None])[:, None] | ((place >= S) & (place <= last[..., None]))
    scores = scaled.sum(2).masked_fill(~seen, float("-inf"))
    best = scores.sort(dim=-1, descending=True, stable=True)
    order, there = best.indices[..., :count], best.values[..., :count] > float("-inf")
    position = torch.where(order < S, order, order - S + base[:, None, None])
    return sort_positions(position, there, count)


def sort_positions(position: Tensor, there: Tensor, count: int) -> Tensor:
    """Sort the valid positions [.., k] and pad them with `NONE` to `count`."""
    after_all = torch.iinfo(torch.int64).max
    positions = torch.where(there, position, after_all).sort(dim=-1).values
    positions = torch.where(positions == after_all, NONE, positions)
    return F.pad(positions, (0, count - positions.shape[-1]), value=NONE)


def chosen_mask(chosen: Tensor, base: Tensor, rows: int, fresh_rows: int) -> Tensor:
    """Return which rows of the cache, then which fresh rows, are chosen: [B, T, S + F] bool.

    chosen [B, T, k]: positions; those from base [B] on are fresh rows.
    """
    B, T, _ = chosen.shape
    start = base[:, None, None]
    end = rows + fresh_rows
    place = torch.where(chosen < start, chosen, chosen - start + rows)
    place = torch.where(chosen < 0, end, place).clamp(max=end)  # idle slots have any positions
    mask = torch.zeros(B, T, end + 1, dtype=torch.bool, device=chosen.device)
    return mask.scatter(-1, place, True)[..., :end]
