"""mla_queries and mla_values: each head's absorbed projections, with their changes of layout."""

import torch
from torch import Tensor

from mtpbuild.plugins.definition import define
from mtpbuild.plugins.rope.op import rope


def empty_queries(q: Tensor, w_uk: Tensor, cos: Tensor) -> Tensor:
    """Return an empty tensor like the queries; q may be partial sums [splits, B, T, ..]."""
    B, T, heads, rank = *q.shape[-3:-1], w_uk.shape[0], w_uk.shape[2]
    return w_uk.new_empty(B, heads, T, rank + 2 * cos.shape[-1])


@define(empty_queries)
def mla_queries(q: Tensor, w_uk: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Compute attention's queries [B, H, T, kv_lora_rank + R] from q [B, T, H * (n + R)].

    q contains n values without position for each head, then R rotary values for each head. The
    former are multiplied by w_uk [H, n, kv_lora_rank]; the latter are rotated by cos and sin
    [B, T, R / 2] fp32 as in `rope`. Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.
    """
    (B, T, width), (H, n, _) = q.shape, w_uk.shape
    nope, pe = q.split([H * n, width - H * n], dim=-1)
    pe = rope(pe.contiguous(), cos, sin, H, interleaved)
    nope, pe = (part.reshape(B, T, H, -1).transpose(1, 2) for part in (nope, pe))
    return torch.cat([nope @ w_uk, pe], dim=-1)


@define(lambda o, w_uv: o.new_empty(o.shape[0], o.shape[2], w_uv.shape[0] * w_uv.shape[2]))
def mla_values(o: Tensor, w_uv: Tensor) -> Tensor:
    """Project mixed latents o [B, H, T, kv_lora_rank] by w_uv [H, kv_lora_rank, v] to values.

    Returns [B, T, H * v]. Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.
    """
    return (o @ w_uv).transpose(1, 2).flatten(2)
