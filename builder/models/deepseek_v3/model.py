"""DeepSeek-V3 with its MTP modules: latent attention over a cache of latents and rotary keys.

Shapes: B slots, T tokens, E hidden size, H heads, S cache rows, C = kv_lora_rank + rope dim.
`reference.py` is the plain counterpart; `weights.py` maps checkpoint tensors to the parameters.
"""

from typing import Any

import torch
from torch import Tensor

from mtpbuild.builder.models.common.blocks import PackedWeight
from mtpbuild.builder.models.common.causal_lm import UniformLM
from mtpbuild.builder.models.common.layers import Attention, Positions, RMSNorm
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
from mtpbuild.runtime.ranks import ALONE, Ranks


class LatentAttention(Attention):
    """Latent attention: the absorbed form in steps, the expanded form in prompts.

    docs/architecture.md gives the reason.
    """

    by_fused_kernels = ("q_a_layernorm", "kv_a_layernorm", "w_uk", "w_uv")

    def __init__(self, c: DeepseekV3Config, ranks: Ranks) -> None:
        super().__init__()
        H, n, R = c.num_attention_heads // ranks.parts, c.qk_nope_head_dim, c.qk_rope_head_dim
        self.config = c
        self.heads = H
        self.scale = softmax_scale(c.rope, c.qk_head_dim)
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

    def compute_first_product(self, x: Tensor, rows: Positions) -> tuple[Any, ...]:
        """Compute the first operands of `mla_rows`."""
        norm = None if self.config.q_lora_rank is None else self.q_a_layernorm.weight
        return x @ self.qkv_a_proj, norm, self.kv_a_layernorm.weight, rows.cos, rows.sin

    def write(self, x: Tensor, rows: Positions, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        operands = self.compute_first_product(x, rows)
        return mla_rows_write(*operands, cache, rows.start, c.latent_norm_eps, c.rope_interleave)

    def project(self, x: Tensor, rows: Positions) -> tuple[Tensor, Tensor]:
        c = self.config
        return mla_rows(*self.compute_first_product(x, rows), c.latent_norm_eps, c.rope_interleave)

    def compute_second_product(self, q: Tensor) -> Tensor:
        """Project query input [B, T, ..] to all heads' nope, then all heads' pe."""
        return q if self.config.q_lora_rank is None else q @ self.q_b_proj

    def attend(
        self, q: Tensor, rows: Positions, cache: Tensor, fresh: Tensor, first: Tensor
    ) -> Tensor:
        q = self.compute_second_product(q)
        if rows.expand:
            return self.expanded(q, rows, cache) @ self.o_proj
        return self.absorbed(q, rows, cache, fresh, first) @ self.o_proj

    def absorbed(
        self, q: Tensor, rows: Positions, cache: Tensor, fresh: Tensor, first: Tensor
    ) -> Tensor:
        """Attend to latents with queries q [B, T, ..]: [B, T, H v]."""
        c = self.config
        if isinstance(uk := self.w_uk, PackedWeight):
            uv: Any = self.w_uv
            return mla_packed(
                q,
                w_uk=uk.values,
                w_uk_scales=uk.scales,
                w_uv=uv.values,
                w_uv_scales=uv.scales,
                cos=rows.cos,
                sin=rows.sin,
                cache=cache,
                fresh=fresh,
                base=rows.base,
                first=first,
                scale=self.scale,
                kv_lora_rank=c.kv_lora_rank,
                v_head_dim=c.v_head_dim,
                interleaved=c.rope_interleave,
                chosen=rows.choice.rows,
            )
        o = mla_attention(
            mla_queries(q, uk, rows.cos, rows.sin, c.rope_interleave),
            cache=cache,
            fresh=fresh,
            base=rows.base,
            first=first,
            scale=self.scale,
            kv_lora_rank=c.kv_lora_rank,
            chosen=rows.choice.rows,
        )
        return mla_values(o, self.w_uv)

    def expanded(self, q: Tensor, rows: Positions, cache: Tensor) -> Tensor:
        """Attend in the expanded form over a cache that holds the fresh rows: [B, T, H v].

        With widths r, n, v of latent, nope and values, expanding S rows costs 2 S H r (n + v)
        operations and saves 2 S T H (2 r - n - v): it pays from T = 51 (tiny) or 170 (V3) on.
        """
        c = self.config
        base = rows.base
        chosen = rows.choice.rows
        (B, T, _), H, S = q.shape, self.heads, cache.shape[2]
        nope, pe = q.split([H * c.qk_nope_head_dim, H * c.qk_rope_head_dim], dim=-1)
        pe = rope(pe, rows.cos, rows.sin, H, c.rope_interleave)
        q = torch.cat([part.reshape(B, T, H, -1) for part in (nope, pe)], dim=-1).transpose(1, 2)
        sizes = [c.kv_lora_rank, c.qk_rope_head_dim, cache.shape[-1] - c.cache_dim]
        latent, k_pe, *_ = cache.split([size for size in sizes if size], dim=-1)  # [B, 1, S, ..]
        k_nope, v = latent @ self.w_uk.mT, latent @ self.w_uv  # [B, H, S, ..]
        k = torch.cat([k_nope, k_pe.expand(-1, H, -1, -1)], dim=-1)
        if chosen is None:
            last = base[:, None] + torch.arange(T, device=base.device)
            seen = torch.arange(S, device=base.device) <= last[:, None, :, None]  # [B, 1, T, S]
        else:  # positions are cache rows, as the fresh rows are in the cache
            seen = chosen_mask(chosen, torch.full_like(base, S), S, 0)[:, None]
        mask = torch.where(seen, 0.0, float("-inf"))  # equal in all layers, so passes keep only one
        p = floored_softmax((q * self.scale) @ k.mT + mask)
        return (cast(p, v.dtype) @ v).transpose(1, 2).flatten(2)


class DeepseekV3(UniformLM):
    """DeepSeek-V3, or the part of it that one of `ranks` computes."""

    config: DeepseekV3Config

    def __init__(self, c: DeepseekV3Config, ranks: Ranks = ALONE) -> None:
        super().__init__(c, lambda layer: LatentAttention(c, ranks), c.qk_rope_head_dim, ranks)
