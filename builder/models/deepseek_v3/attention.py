"""Multi-head latent attention over a cache of latents and rotary keys.

Shapes: B slots, T tokens, E hidden size, H heads, S cache rows, C = kv_lora_rank + rope dim.
`reference.py` is the plain counterpart; `weights.py` maps checkpoint tensors to the parameters.
"""

from typing import Any

import torch
from torch import Tensor

from mtpbuild.builder.models.common.blocks import Packed
from mtpbuild.builder.models.common.layers import Attention, RMSNorm, Rows
from mtpbuild.builder.models.common.precision import cast, parameter
from mtpbuild.builder.models.common.rope import softmax_scale
from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config
from mtpbuild.plugins import (
    mla_attention,
    mla_packed,
    mla_queries,
    mla_rows,
    mla_rows_write,
    mla_values,
    rope,
)
from mtpbuild.plugins.mla_attention.op import floored_softmax
from mtpbuild.plugins.sparse_rows.op import chosen_mask
from mtpbuild.runtime.ranks import Ranks


class LatentAttention(Attention):
    """Latent attention, in the absorbed form in a step, in the expanded form in a prompt.

    docs/architecture.md gives the reason.
    """

    by_fused_kernels = ("q_a_layernorm", "kv_a_layernorm", "w_uk", "w_uv")

    def __init__(self, c: DeepseekV3Config, ranks: Ranks) -> None:
        super().__init__()
        H, n, R = c.num_attention_heads // ranks.parts, c.qk_nope_head_dim, c.qk_rope_head_dim
        self.config, self.heads, self.scale = c, H, softmax_scale(c.rope, c.qk_head_dim)
        queries = H * (n + R)
        if c.q_lora_rank is None:
            self.qkv_a_proj = parameter(c.hidden_size, queries + c.cache_dim)
        else:
            self.qkv_a_proj = parameter(c.hidden_size, c.q_lora_rank + c.cache_dim)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.latent_norm_eps)
            self.q_b_proj = parameter(c.q_lora_rank, queries)  # all heads' nope, then all heads' pe
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.latent_norm_eps)
        self.w_uk = parameter(H, n, c.kv_lora_rank)
        self.w_uv = parameter(H, c.kv_lora_rank, c.v_head_dim)
        self.o_proj = parameter(H * c.v_head_dim, c.hidden_size)

    @property
    def by_ops(self) -> bool:
        """Return whether ops work between the products; w_uk is plain, or packed for a CPU."""
        return (self.fused and isinstance(self.w_uk, Tensor)) or isinstance(self.w_uk, Packed)

    def first_product(self, x: Tensor, rows: Rows) -> tuple[Any, ...]:
        """Compute the first operands of `mla_rows`."""
        norm = None if self.config.q_lora_rank is None else self.q_a_layernorm.weight
        return x @ self.qkv_a_proj, norm, self.kv_a_layernorm.weight, rows.cos, rows.sin

    def write(self, x: Tensor, rows: Rows, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.padded or not self.by_ops:  # a plugin can't write into its operands
            return super().write(x, rows, cache)
        c, operands = self.config, self.first_product(x, rows)
        return mla_rows_write(*operands, cache, rows.start, c.latent_norm_eps, c.rope_interleave)

    def project(self, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Compute query input and cache rows; with ops the query input is already normalised."""
        c = self.config
        if self.by_ops:
            operands = self.first_product(x, rows)
            return mla_rows(*operands, c.latent_norm_eps, c.rope_interleave)
        a = x @ self.qkv_a_proj
        width = a.shape[-1] - c.cache_dim
        q, latent, k_pe = a.split([width, c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        k_pe = rope(k_pe, rows.cos, rows.sin, 1, c.rope_interleave)
        return q, torch.cat([self.kv_a_layernorm(latent), k_pe], dim=-1)[:, None]

    def queries(self, q: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Compute nope and pe parts [B, H, T, ..] of the queries from query input [B, T, ..]."""
        c, (B, T, _), H = self.config, q.shape, self.heads
        q = self.second_product(q)
        q_nope, q_pe = q.split([H * c.qk_nope_head_dim, H * c.qk_rope_head_dim], dim=-1)
        q_pe = rope(q_pe, rows.cos, rows.sin, H, c.rope_interleave)
        q_nope, q_pe = q_nope.reshape(B, T, H, -1), q_pe.reshape(B, T, H, -1)
        return q_nope.transpose(1, 2), q_pe.transpose(1, 2)

    def second_product(self, q: Tensor) -> Tensor:
        """Project query input [B, T, ..] to all heads' nope, then all heads' pe."""
        if self.config.q_lora_rank is None:
            return q
        return (q if self.by_ops else self.q_a_layernorm(q)) @ self.q_b_proj

    def attend(self, q: Tensor, rows: Rows, cache: Tensor, fresh: Tensor, first: Tensor) -> Tensor:
        c, base = self.config, rows.base
        chosen = () if rows.choice.rows is None else (rows.choice.rows,)
        if self.by_ops and not rows.expand:
            q, angles = self.second_product(q), (rows.cos, rows.sin)
            if isinstance(self.w_uk, Packed):
                uk, uv, place = self.w_uk, self.w_uv, (cache, fresh, base, first)
                weights = uk.values, uk.scales, uv.values, uv.scales
                sizes = self.scale, c.kv_lora_rank, c.v_head_dim
                o = mla_packed(q, *weights, *angles, *place, *sizes, c.rope_interleave, *chosen)
                return o @ self.o_proj
            q = mla_queries(q, self.w_uk, *angles, c.rope_interleave)
            o = mla_attention(q, cache, fresh, base, first, self.scale, c.kv_lora_rank, *chosen)
            return mla_values(o, self.w_uv) @ self.o_proj
        q_nope, q_pe = self.queries(q, rows)
        if rows.expand:
            o = self.expanded(q_nope, q_pe, cache, base, *chosen)
        else:
            q = torch.cat([q_nope @ self.w_uk, q_pe], dim=-1)
            o = mla_attention(q, cache, fresh, base, first, self.scale, c.kv_lora_rank, *chosen)
            o = o @ self.w_uv
        return o.transpose(1, 2).flatten(2) @ self.o_proj

    def expanded(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        cache: Tensor,
        base: Tensor,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Attend in the non-absorbed form over a cache that holds the fresh rows: [B, H, T, v].

        Expanding S rows costs 2 S H r (n + v) operations and saves 2 S T H (2 r - n - v) in the
        products: it pays from T = 51 (deepseek-tiny) or 170 (DeepSeek-V3) tokens on.
        """
        c, T, S = self.config, q_nope.shape[2], cache.shape[2]
        sizes = [c.kv_lora_rank, c.qk_rope_head_dim, cache.shape[-1] - c.cache_dim]
        latent, k_pe, *_ = cache.split([size for size in sizes if size], dim=-1)  # [B, 1, S, ..]
        k_nope, v = latent @ self.w_uk.mT, latent @ self.w_uv  # [B, H, S, ..]
        k = torch.cat([k_nope, k_pe.expand(-1, self.heads, -1, -1)], dim=-1)
        q = torch.cat([q_nope, q_pe], dim=-1) * self.scale
        if chosen is None:
            last = base[:, None] + torch.arange(T, device=base.device)
            seen = torch.arange(S, device=base.device) <= last[:, None, :, None]  # [B, 1, T, S]
        else:  # positions are cache rows, as the fresh rows are in the cache
            seen = chosen_mask(chosen, torch.full_like(base, S), S, 0)[:, None]
        mask = torch.where(seen, 0.0, float("-inf"))  # equal in all layers, so passes keep only one
        scores = q @ k.mT + mask
        p = scores.softmax(-1) if self.kernels else floored_softmax(scores)
        return cast(p, v.dtype) @ v
