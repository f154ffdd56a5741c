"""DeepSeek-V3's table from checkpoint tensors to the program's weights."""

from __future__ import annotations  # Tensor is imported for types alone

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from mtpbuild.builder.lazy_torch import torch
from mtpbuild.builder.models.common.moe_weights import list_feed_forward_weights
from mtpbuild.builder.models.common.weight import (
    Share,
    StoredTensor,
    Weight,
    make_weight_table,
    product,
    vector,
)
from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config

if TYPE_CHECKING:
    from torch import Tensor


def weight_table(c: DeepseekV3Config, share: Share) -> list[Weight]:
    """Return every weight of main model and MTP modules, in the order of use.

    A `StoredTensor` has the checkpoint's shape; transforms receive it already cut to the share.
    """
    attention = partial(list_latent_weights, c, share)
    return make_weight_table(c, attention, partial(list_feed_forward_weights, c, share))


def list_latent_weights(
    c: DeepseekV3Config, share: Share, index: int, at: str, to: str
) -> Iterator[Weight]:
    """Yield the weights of a layer's latent attention."""
    at, to = f"{at}.self_attn", f"{to}.self_attn"
    E, H, r = c.hidden_size, c.num_attention_heads, c.kv_lora_rank
    n, R, v = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    heads_here = H // share.ranks.parts
    kv_a = StoredTensor(f"{at}.kv_a_proj_with_mqa.weight", (r + R, E))

    def reorder_by_part(q: Tensor, *others: Tensor) -> Tensor:
        """Reorder q's rows, (nope, pe) per head, to all nope, then all pe; append the others."""
        heads = q.unflatten(0, (heads_here, n + R))
        return torch.cat([heads[:, :n].flatten(0, 1), heads[:, n:].flatten(0, 1), *others])

    if c.q_lora_rank is None:
        q = StoredTensor(f"{at}.q_proj.weight", (H * (n + R), E), axis=0)
        yield product(f"{to}.qkv_a_proj", q, kv_a, rows=reorder_by_part)
    else:
        q_a = StoredTensor(f"{at}.q_a_proj.weight", (c.q_lora_rank, E))
        yield product(f"{to}.qkv_a_proj", q_a, kv_a)
        yield vector(to, at, "q_a_layernorm.weight", c.q_lora_rank)
        q_b = StoredTensor(f"{at}.q_b_proj.weight", (H * (n + R), c.q_lora_rank), axis=0)
        yield product(f"{to}.q_b_proj", q_b, rows=reorder_by_part)
    yield vector(to, at, "kv_a_layernorm.weight", r)
    kv_b = StoredTensor(f"{at}.kv_b_proj.weight", (H * (n + v), r), axis=0)

    def keys(w: Tensor) -> Tensor:
        return w.unflatten(0, (heads_here, n + v))[:, :n]

    def values(w: Tensor) -> Tensor:
        return w.unflatten(0, (heads_here, n + v))[:, n:].mT

    yield Weight(f"{to}.w_uk", (kv_b,), keys, per_head=(H, n, r))
    yield Weight(f"{to}.w_uv", (kv_b,), values, per_head=(H, r, v))
    yield product(f"{to}.o_proj", StoredTensor(f"{at}.o_proj.weight", (E, H * v), axis=1))
