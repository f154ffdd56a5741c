"""stream_rows: turn the first product of attention to whole rows into its queries and its rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpbuild.plugins.definition import Node, define
from mtpbuild.plugins.grouped_rows.op import write_ring
from mtpbuild.plugins.int8_rows import round_as
from mtpbuild.plugins.kv_write.op import kv_write

NODE = Node(
    "LatentRows",
    renamed={"eps": "epsilon"},
    attributes=lambda known: {"interleaved": 1, "whole": 1},
    typed="cache",
)


def empty_stream_rows(a: Tensor, q_norm: Tensor, kv_norm: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty tensors like the results of stream_rows."""
    (B, T, _), Q, D = a.shape, q_norm.shape[0], kv_norm.shape[0]
    return a.new_empty(B, T, Q), a.new_empty(B, 1, T, D)


@define(empty_stream_rows, NODE)
def stream_rows(
    a: Tensor, q_norm: Tensor, kv_norm: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Norm a [B, T, Q + D], the queries' latent and a row that is both key and value.

    The norms' weights are q_norm [Q] and kv_norm [D]. cos, sin [B, T, R / 2] fp32 rotate the last R
    numbers of a row. Returns the latent [B, T, Q] and the cache rows [B, 1, T, D].
    """
    latent, row = a.split([q_norm.shape[0], kv_norm.shape[0]], dim=-1)
    row = rotate_end(F.rms_norm(row, kv_norm.shape, kv_norm, eps), cos, sin)
    return F.rms_norm(latent, q_norm.shape, q_norm, eps), row[:, None]


@define(
    lambda a, q_norm, kv_norm, cache: (
        *empty_stream_rows(a, q_norm, kv_norm),
        torch.empty_like(cache),
    ),
    NODE,
)
def stream_rows_write(
    a: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    start: Tensor,
    eps: float,
    ring: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do `stream_rows`, then `kv_write` of its rows into a cache [B, 1, S, D] at start [B].

    ring: after its last row the cache begins anew, and a slot whose start is negative writes
    nothing. The third result is the cache. As with `kv_write`, a target binds it to the cache's own
    memory. If the cache has another type, the rows are rounded to that type.
    """
    R = 2 * cos.shape[-1]
    latent, fresh = stream_rows(a, q_norm, kv_norm, cos, sin, eps)
    rounded, fresh = round_as(cache, fresh, [kv_norm.shape[0] - R, R])
    write = write_ring if ring else kv_write
    return latent, fresh, write(cache, rounded, start)


def rotate_end(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last R numbers of x [B, T, .., D] in neighbouring pairs.

    cos, sin: [B, T, R / 2].
    """
    size = 2 * cos.shape[-1]
    for _ in x.shape[3:]:
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    rest, turned = x[..., : x.shape[-1] - size], x[..., x.shape[-1] - size :]
    a, b = turned[..., 0::2], turned[..., 1::2]
    both = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([rest, both.type_as(x)], dim=-1)
