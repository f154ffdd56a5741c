"""grouped_attention: a few query tokens per slot attend to the committed and the fresh rows."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mtpbuild.plugins.definition import Node, define
from mtpbuild.plugins.mla_attention.op import floored_softmax, holds_rows, seen_rows


def grouped_layout(known: Mapping[str, Any]) -> dict[str, int]:
    """Return the node's attributes for rows that hold all groups' keys, then all their values."""
    values = int(known["fresh"].shape[3]) // 2
    written = int(holds_rows(known["cache"], known["fresh"]))
    return {"values": values, "latent": values // known["groups"], "written": written}


@define(
    lambda q: q.new_empty(q.shape),
    Node("Attention", attributes=grouped_layout),
    fits=lambda *operands, window=0: len(operands) < 8 and not window,
)
def grouped_attention(
    q: Tensor,
    cache: Tensor,
    fresh: Tensor,
    base: Tensor,
    first: Tensor,
    scale: float,
    groups: int,
    window: int = 0,
) -> Tensor:
    """Attend with H query heads to G groups of keys and values, H / G adjacent heads per group.

    q [B, H, T, D]; cache [B, 1, S, 2 G D], with all groups' keys, then their values in each row;
    fresh [B, 1, F, 2 G D]; base and first [B] int. Query t of slot b sees the cache's rows
    j < base[b] and the fresh rows i <= first[b] + t. Returns [B, H, T, D].

    window: a query sees that many rows, the last one of these included; 0: no bound. The cache is
    then a ring, with position p in row p % S, and has at least window + T rows.

    Rows of the cache from base on are masked, as in `mla_attention`, so it does not matter whether
    the fresh rows have been written there yet.
    """
    (B, H, T, D), S, F = q.shape, cache.shape[2], fresh.shape[2]
    seen = seen_rows(S, F, base, first, T)
    if window:
        seen = see_window(S, F, base, first, T, window)
    k, v = (heads_of(cache, fresh, half, groups) for half in (0, 1))
    rows = (q * scale).reshape(B, groups, -1, T, D)
    scores = (rows @ k.mT[:, :, None]).float().masked_fill(~seen[:, None, None], float("-inf"))
    return (floored_softmax(scores).type_as(q) @ v[:, :, None]).reshape(B, H, T, D)


def see_window(
    rows: int, fresh_rows: int, base: Tensor, first: Tensor, tokens: int, window: int
) -> Tensor:
    """Return which rows of a ring, then which fresh rows, each token sees: [B, T, S + F]."""
    last = base[:, None] - 1
    positions = last - (last - torch.arange(rows, device=base.device)) % rows
    fresh = base[:, None] + torch.arange(fresh_rows, device=base.device)
    places = torch.cat([positions, fresh], dim=1)[:, None]
    at = (base + first)[:, None, None] + torch.arange(tokens, device=base.device)[:, None]
    return (places >= 0) & (places <= at) & (places > at - window)


def heads_of(cache: Tensor, fresh: Tensor, half: int, groups: int) -> Tensor:
    """Return the keys (half 0) or values (1) [B, G, S + F, D] of all rows, the fresh ones last."""
    rows = torch.cat([cache[:, 0].chunk(2, -1)[half], fresh[:, 0].chunk(2, -1)[half]], dim=1)
    return rows.unflatten(-1, (groups, -1)).transpose(1, 2)
