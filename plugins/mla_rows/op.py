"""mla_rows: turn latent attention's first product into its query input and its cache rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpbuild.plugins.definition import Node, define
from mtpbuild.plugins.int8_rows import round_as
from mtpbuild.plugins.kv_write.op import kv_write
from mtpbuild.plugins.rope.op import rope

NODE = Node("LatentRows", renamed={"eps": "epsilon"}, typed="cache")


def empty_rows(a: Tensor, kv_norm: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty tensors like the results; a may be partial sums [splits, B, T, ..]."""
    (B, T, width), kept = a.shape[-3:], kv_norm.shape[0] + 2 * cos.shape[-1]
    return kv_norm.new_empty(B, T, width - kept), kv_norm.new_empty(B, 1, T, kept)


@define(empty_rows, NODE)
def mla_rows(
    a: Tensor,
    q_norm: Tensor | None,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Split a [B, T, Q + kv_lora_rank + R] into query part, latent and rotary key, and finish them.

    Query part and latent get RMSNorms in fp32 with weights q_norm [Q] and kv_norm [kv_lora_rank];
    without q_norm the query part is unchanged. cos, sin [B, T, R / 2] fp32 rotate the key. Returns
    the query input [B, T, Q] and the cache rows [B, 1, T, kv_lora_rank + R]. Source: DeepSeek-V3
    (arXiv:2412.19437), section 2.1.1.
    """
    rank, rotary = kv_norm.shape[0], 2 * cos.shape[-1]
    q, latent, key = a.split([a.shape[-1] - rank - rotary, rank, rotary], dim=-1)
    q = q.clone() if q_norm is None else F.rms_norm(q, q_norm.shape, q_norm, eps)
    latent = F.rms_norm(latent, kv_norm.shape, kv_norm, eps)
    key = rope(key.contiguous(), cos, sin, 1, interleaved)
    return q.contiguous(), torch.cat([latent, key], dim=-1)[:, None]


@define(
    lambda a, kv_norm, cos, cache: (*empty_rows(a, kv_norm, cos), torch.empty_like(cache)), NODE
)
def mla_rows_write(
    a: Tensor,
    q_norm: Tensor | None,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    start: Tensor,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do `mla_rows`, then `kv_write` of its rows into a cache [B, 1, S, C] from row start [B] on.

    The third result is the cache. As with `kv_write`, a target binds it to the cache's own memory.
    If the cache has another type, the rows are rounded to that type.
    """
    q, fresh = mla_rows(a, q_norm, kv_norm, cos, sin, eps, interleaved)
    rounded, fresh = round_as(cache, fresh, [kv_norm.shape[0], 2 * cos.shape[-1]])
    return q, fresh, kv_write(cache, rounded, start)
