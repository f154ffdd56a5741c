"""compressed_attention and choose_compressed: attend to a window and to compressed rows.

Source: DeepSeek-V4 (arXiv:2606.19348). A row of r tokens lies in the places that the last
min(r, 64) of them have in a cache, whose numbers are adjacent.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpbuild.plugins.definition import Node, define
from mtpbuild.plugins.sparse_rows.op import NONE
from mtpbuild.plugins.stream_rows.op import rotate_end


def place_tokens(base: Tensor, first: Tensor, tokens: int) -> Tensor:
    """Return the positions [B, T] of queries, the first of which is at base + first [B]."""
    return (base + first)[:, None] + torch.arange(tokens, device=base.device)


def place_queries(base: Tensor, first: Tensor, tokens: int, fresh: Tensor, written: bool) -> Tensor:
    """Do `place_tokens`, but after the last fresh row only if the cache has the rows, too."""
    position = place_tokens(base, first, tokens)
    return position if written else position.minimum(base[:, None] + (fresh.shape[2] - 1))


def read_compressed(cache: Tensor, ratio: int, group: int, first: int, width: int) -> Tensor:
    """Return numbers `first` .. of the compressed rows of a cache [B, 1, S, C]: [B, n, width].

    A row of `ratio` tokens lies in the places of the last `group` of them.
    """
    count = cache.shape[2] // ratio
    token = torch.arange(ratio - group, ratio, device=cache.device)
    at = torch.arange(count, device=cache.device)[:, None] * ratio + token
    rows = cache[:, 0].index_select(1, at.flatten()).reshape(-1, count, group * cache.shape[3])
    return rows[..., first : first + width]


def see_complete(position: Tensor, rows: int, ratio: int) -> Tensor:
    """Return which compressed rows are complete for queries at [B, T]: [B, T, rows] bool."""
    complete = (position + 1) // ratio
    return torch.arange(rows, device=position.device) < complete[..., None]


def norm_queries(q: Tensor, heads: int, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Norm queries [B, T, H D] by head, without a weight, and rotate them: [B, H, T, D]."""
    q = q.unflatten(-1, (heads, -1))
    size = q.shape[-1:]
    return rotate_end(F.rms_norm(q, size, q.new_ones(size), eps), cos, sin).transpose(1, 2)


def attention_layout(known: Mapping[str, Any]) -> dict[str, float]:
    """Return the node's attributes for rows that are keys and values."""
    width = int(known["cache"].shape[3])
    sizes = {"groups": 1, "values": 0, "latent": width, "heads": int(known["sinks"].shape[0])}
    return {"scale": width**-0.5, **sizes}


@define(
    lambda q: torch.empty_like(q),
    Node("CompressedAttention", renamed={"eps": "epsilon"}, attributes=attention_layout),
)
def compressed_attention(
    q: Tensor,
    sinks: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    base: Tensor,
    first: Tensor,
    fresh: Tensor,
    compressed: Tensor | None,
    chosen: Tensor | None,
    window: int,
    ratio: int,
    group: int,
    written: bool,
    eps: float,
) -> Tensor:
    """Attend with H heads to the rows of a window and to compressed rows -> [B, T, H D].

    q [B, T, H D] is normed by head, without a weight, and its last R numbers are rotated by
    cos, sin [B, T, R / 2]; those of the result are rotated back. A row is key and value. sinks [H]:
    a score of each head that has no value. Query t has position base + first + t, both [B].

    A query sees the last `window` rows: those before base in a cache [B, 1, S, D], with position p
    in row p % S, and from base on the fresh rows [B, 1, F, D]. written: the cache has these, too.
    compressed [B, 1, N, C]: a cache of compressed rows, with numbers of other rows after the first
    D. A query sees those that are complete, or the ones with the numbers chosen [B, T, k].

    A query after the last fresh row sees what one at its place does.
    """
    (S, D), H = cache.shape[2:], sinks.shape[0]
    q = norm_queries(q, H, cos, sin, eps)
    position = place_queries(base, first, q.shape[2], fresh, written)
    before = base[:, None] + torch.arange(1 - window, 0, device=base.device)
    places = before.clamp(min=0)
    if isinstance(S, int):  # else a cache of all positions
        places = places % S
    slots = torch.arange(q.shape[0], device=base.device)[:, None]
    keys = torch.cat([cache[:, 0][slots, places].type_as(fresh), fresh[:, 0]], dim=1)
    offsets = torch.arange(fresh.shape[2], device=base.device)
    at = torch.cat([before, base[:, None] + offsets], dim=1)[:, None]
    ahead = position[..., None] - at
    seen = (ahead >= 0) & (ahead < window) & (at >= 0)
    if compressed is not None:
        entries = read_compressed(compressed, ratio, group, 0, D).type_as(fresh)
        count = entries.shape[1]
        complete = see_complete(position, count, ratio)
        if chosen is not None:
            none = torch.zeros_like(F.pad(complete, (0, 1)))
            complete = none.scatter(-1, torch.where(chosen < 0, count, chosen), True)[..., :count]
        keys, seen = torch.cat([keys, entries], dim=1), torch.cat([seen, complete], dim=-1)
    scores = (q @ keys[:, None].mT).float() * D**-0.5
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    sink = sinks[:, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1].type_as(keys)
    o = (weights @ keys[:, None]).transpose(1, 2)
    return rotate_end(o, cos, -sin).flatten(2)


@define(
    lambda weights, count: weights.new_empty(*weights.shape[:2], count, dtype=torch.int64),
    Node("ChooseCompressed"),
)
def choose_compressed(
    q: Tensor,
    weights: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    base: Tensor,
    first: Tensor,
    count: int,
    ratio: int,
    group: int,
    place: int,
) -> Tensor:
    """Do `choose_rows` among the compressed rows that are complete: their numbers [B, T, count].

    The last R numbers of a query are rotated. A row's key is its numbers from `place` on.
    """
    T, heads = weights.shape[1:]
    q = rotate_end(q.unflatten(-1, (heads, -1)), cos, sin)
    size = q.shape[-1]
    keys = read_compressed(cache, ratio, group, place, size).float()
    raw = (q.flatten(1, 2).float() @ keys.mT).unflatten(1, (T, heads))  # [B, T, H, n]
    scaled = weights.float()[..., None] * heads**-0.5 * (raw * size**-0.5).relu()
    seen = see_complete(place_tokens(base, first, T), keys.shape[1], ratio)
    scores = scaled.sum(2).masked_fill(~seen, float("-inf"))
    padded = F.pad(scores, (0, count), value=float("-inf"))
    least = padded.topk(count, dim=-1).values[..., -1:]
    above, equal = padded > least, padded == least
    taken = above.sum(-1, keepdim=True)  # the others have the least score, in their order
    best = above | (equal & (equal.cumsum(-1) + taken <= count) & (padded > float("-inf")))
    after_all = padded.shape[-1]
    numbers = torch.where(best, torch.arange(after_all, device=q.device), after_all)
    first_ones = numbers.topk(count, dim=-1, largest=False).values
    return torch.where(first_ones == after_all, NONE, first_ones)
