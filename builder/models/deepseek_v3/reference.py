"""The plain model: DeepSeek-V3 with its MTP modules, with attention in the non-absorbed form."""

import torch
from torch import Tensor, nn

from mtpbuild.builder.models.common.plain import (
    PlainAttention,
    PlainCausalLM,
    PlainRMSNorm,
)
from mtpbuild.builder.models.common.rope import rotate, softmax_scale
from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config


class PlainLatentAttention(PlainAttention):
    """Multi-head latent attention in the non-absorbed form."""

    def __init__(self, c: DeepseekV3Config) -> None:
        super().__init__()
        H, E = c.num_attention_heads, c.hidden_size
        self.config, self.scale = c, softmax_scale(c.rope, c.qk_head_dim)
        if c.q_lora_rank is None:
            self.q_proj = nn.Linear(E, H * c.qk_head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(E, c.q_lora_rank, bias=False)
            self.q_a_layernorm = PlainRMSNorm(c.q_lora_rank, c.latent_norm_eps)
            self.q_b_proj = nn.Linear(c.q_lora_rank, H * c.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(E, c.cache_dim, bias=False)
        self.kv_a_layernorm = PlainRMSNorm(c.kv_lora_rank, c.latent_norm_eps)
        expanded = H * (c.qk_nope_head_dim + c.v_head_dim)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, expanded, bias=False)
        self.o_proj = nn.Linear(H * c.v_head_dim, E, bias=False)

    def queries(self, x: Tensor) -> Tensor:
        if self.config.q_lora_rank is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c, (B, T, _) = self.config, x.shape
        q = self.queries(x).view(B, T, c.num_attention_heads, c.qk_head_dim).transpose(1, 2)
        q_nope, q_pe = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        latent, k_pe = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(B, T, c.num_attention_heads, -1)
        k_nope, v = kv.transpose(1, 2).split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        q_pe = rotate(q_pe, cos, sin, c.rope_interleave)
        k_pe = rotate(k_pe, cos, sin, c.rope_interleave)  # one for all heads
        k_pe = k_pe[:, None].expand_as(q_pe)
        q, k = torch.cat([q_nope, q_pe], -1), torch.cat([k_nope, k_pe], -1)
        seen = self.mask(x, cos, sin)
        k = k.type_as(q)
        o = self.attend(q, k, v, seen, is_causal=seen is None, scale=self.scale)
        return self.o_proj(o.transpose(1, 2).reshape(B, T, -1))

    def mask(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
        """Return the rows that tokens attend to, [B, T, T] bool; None: causal attention."""
        return None


class PlainDeepseek(PlainCausalLM):
    config: DeepseekV3Config

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(
            config, lambda layer: PlainLatentAttention(config), config.qk_rope_head_dim
        )
