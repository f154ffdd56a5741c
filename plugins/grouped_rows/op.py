"""grouped_rows: turn grouped attention's product into its queries and its cache rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpbuild.plugins.definition import Node, define
from mtpbuild.plugins.grouped_attention.op import grouped_attention, grouped_layout
from mtpbuild.plugins.int8_rows import read_both, round_as
from mtpbuild.plugins.kv_write.op import kv_write
from mtpbuild.plugins.rope.op import rope

NODE = Node("GroupedRows", renamed={"eps": "epsilon"}, typed="cache")


def empty_rows(a: Tensor, groups: int, width: int, shares_values: bool) -> tuple[Tensor, Tensor]:
    """Return empty tensors like the results of grouped_rows."""
    B, T, every = a.shape
    keys = groups * width
    queries = every - keys * (1 if shares_values else 2)
    return a.new_empty(B, T, queries), a.new_empty(B, 1, T, 2 * keys)


@define(empty_rows, NODE)
def grouped_rows(
    a: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    groups: int,
    width: int,
    eps: float,
    plus_one: bool = False,
    norms_values: bool = False,
    shares_values: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate the heads of a [B, T, H D + others + 2 G D] with D = width.

    a contains H = `heads` heads of queries, other values that are passed through (such as gates),
    then the keys and the values of G = `groups` heads, which may be none. q_norm and k_norm [D] are
    weights of RMSNorms over a head, which multiply by 1 + weight with `plus_one`. cos, sin
    [B, T, R / 2] fp32 rotate the first R values of each head, in pairs (i, i + R / 2).
    norms_values: values are normed over a head, without a weight. shares_values: a has no values;
    they are the keys as they come. Returns the queries and the other values [B, T, H D + others],
    and the cache rows [B, 1, T, 2 G D].
    """
    stored = groups * width * (1 if shares_values else 2)
    sizes = heads * width, a.shape[-1] - heads * width - stored
    q, others, kept = a.split([*sizes, stored], dim=-1)
    k, v = kept[..., : groups * width], kept[..., -groups * width :]

    def turned(x: Tensor, norm: Tensor | None, count: int) -> Tensor:
        if norm is not None:
            weight = norm + 1.0 if plus_one else norm
            x = F.rms_norm(x.unflatten(-1, (count, width)), (width,), weight, eps).flatten(-2)
        return rope(x.contiguous(), cos, sin, count, False)

    q = turned(q, q_norm, heads)
    if others.shape[-1]:
        q = torch.cat([q, others], dim=-1)
    if not groups:
        return q, kept.clone()[:, None]
    if norms_values:
        apart = v.unflatten(-1, (groups, width))
        v = F.rms_norm(apart, (width,), apart.new_ones(width), eps).flatten(-2)
    return q, torch.cat([turned(k, k_norm, groups), v], dim=-1)[:, None]


@define(
    lambda a, groups, width, cache, shares_values: (
        *empty_rows(a, groups, width, shares_values),
        torch.empty_like(cache),
    ),
    NODE,
)
def grouped_rows_write(
    a: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    start: Tensor,
    heads: int,
    groups: int,
    width: int,
    eps: float,
    plus_one: bool = False,
    norms_values: bool = False,
    shares_values: bool = False,
    ring: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do `grouped_rows`, then `kv_write` of its rows into a cache [B, 1, S, 2 G D] at start [B].

    ring: after its last row the cache begins anew, and a slot whose start is negative writes
    nothing. The third result is the cache. As with `kv_write`, a target binds it to the cache's own
    memory.
    If the cache has another type, the rows are rounded to that type.
    """
    sizes = heads, groups, width, eps, plus_one, norms_values, shares_values
    q, fresh = grouped_rows(a, q_norm, k_norm, cos, sin, *sizes)
    rounded, fresh = round_as(cache, fresh, 2 * groups * [width])
    write = write_ring if ring else kv_write
    return q, fresh, write(cache, rounded, start)


def write_ring(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    """Write rows [B, 1, T, C] into a ring [B, 1, S, C]; a negative start [B] writes nothing."""
    slots = torch.arange(rows.shape[0], device=rows.device)[:, None]
    at = start[:, None] + torch.arange(rows.shape[2], device=rows.device)
    at = at.clamp(min=0) % cache.shape[2]
    kept = torch.where(start[:, None, None] < 0, cache[:, 0][slots, at], rows[:, 0])
    return cache.index_put((slots, torch.zeros_like(at), at), kept)


@define(lambda q: torch.empty_like(q), Node("Attention", attributes=grouped_layout))
def grouped_attention_flat(
    q: Tensor,
    cache: Tensor,
    fresh: Tensor,
    base: Tensor,
    first: Tensor,
    scale: float,
    heads: int,
    groups: int,
    window: int = 0,
) -> Tensor:
    """Do `grouped_attention` with a token's heads adjacent: q and the result are [B, T, H D]."""
    apart = q.unflatten(-1, (heads, -1)).transpose(1, 2)
    cache, fresh = read_both(cache, fresh, 2 * groups * [apart.shape[-1]])
    y = grouped_attention(apart, cache, fresh, base, first, scale, groups, window)
    return y.transpose(1, 2).flatten(2)
