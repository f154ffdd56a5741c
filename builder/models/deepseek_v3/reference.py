"""The model undressed: whole sequences, no caches, the checkpoint's names. The tests' oracle.

Written for reading (spec/deepseek-v3.md sections 2 and 3). The step program computes the same with
caches and absorbed attention; `tools/train_tiny` trains a faster form of the same weights.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpbuild.builder.models.common.reference import Reference
from mtpbuild.builder.models.common.rope import rope_tables, rotate, softmax_scale
from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y.type_as(x)


class Attention(nn.Module):
    """Multi-head latent attention in the non-absorbed form."""

    def __init__(self, c: DeepseekV3Config) -> None:
        super().__init__()
        H, E = c.num_attention_heads, c.hidden_size
        self.config, self.scale = c, softmax_scale(c.rope, c.qk_head_dim)
        if c.q_lora_rank is None:
            self.q_proj = nn.Linear(E, H * c.qk_head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(E, c.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
            self.q_b_proj = nn.Linear(c.q_lora_rank, H * c.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(E, c.cache_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.rms_norm_eps)
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
        o = F.scaled_dot_product_attention(q, k.type_as(q), v, is_causal=True, scale=self.scale)
        return self.o_proj(o.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """Sigmoid scores; the bias selects, the unbiased scores weigh (DeepSeek-V3, "noaux_tc")."""

    def __init__(self, c: DeepseekV3Config) -> None:
        super().__init__()
        self.config = c
        self.weight = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(c.n_routed_experts))
        self.e_score_correction_bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> combine weights [..., experts], zero for the experts not chosen."""
        c = self.config
        scores = (x.float() @ self.weight.float().T).sigmoid()
        biased = scores + self.e_score_correction_bias
        groups = biased.unflatten(-1, (c.n_group, -1))
        group_scores = groups.topk(2, dim=-1).values.sum(-1)
        best = group_scores.topk(c.topk_group, dim=-1).indices
        keep = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, best, True)
        biased = groups.masked_fill(~keep[..., None], float("-inf")).flatten(-2)
        chosen = biased.topk(c.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if c.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return torch.zeros_like(scores).scatter(-1, chosen, weights * c.routed_scaling_factor)


class MoE(nn.Module):
    """Routed experts, computed densely, plus the shared expert."""

    def __init__(self, c: DeepseekV3Config) -> None:
        super().__init__()
        self.gate = Gate(c)
        self.experts = nn.ModuleList(
            MLP(c.hidden_size, c.moe_intermediate_size) for _ in range(c.n_routed_experts)
        )
        inner = c.moe_intermediate_size * c.n_shared_experts
        self.shared_experts = MLP(c.hidden_size, inner) if inner else None

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).type_as(x)
        y = torch.zeros_like(x) if self.shared_experts is None else self.shared_experts(x)
        for e, expert in enumerate(self.experts):
            y = y + weights[..., e : e + 1] * expert(x)
        return y


class DecoderLayer(nn.Module):
    def __init__(self, c: DeepseekV3Config, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MoE(c) if c.is_moe(layer) else MLP(c.hidden_size, c.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class MTPModule(DecoderLayer):
    """One MTP module: `model.layers.{L+j}` of the checkpoint (spec section 3)."""

    def __init__(self, c: DeepseekV3Config, layer: int) -> None:
        super().__init__(c, layer)
        self.enorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hnorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        # Its own final norm; the head is the main model's.
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(c.hidden_size, c.rms_norm_eps)})

    def draft(self, embedding: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Emb(t_{p+k}) and the hidden of slot p -> the module's normed hidden of slot p."""
        x = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden)], dim=-1))
        return self.shared_head["norm"](super().forward(x, cos, sin))


class Model(nn.Module):
    """Holds the checkpoint's `model.` prefix."""

    def __init__(self, c: DeepseekV3Config) -> None:
        super().__init__()
        total = c.num_hidden_layers + c.num_nextn_predict_layers
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(
            (DecoderLayer if i < c.num_hidden_layers else MTPModule)(c, i) for i in range(total)
        )
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class Transformer(Reference):
    """Main model and MTP modules over whole sequences; state_dict names are the checkpoint's."""

    config: DeepseekV3Config
    cos: Tensor
    sin: Tensor

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.config = config
        self.model = Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        cos, sin = rope_tables(config.rope, config.qk_rope_head_dim, config.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def main(self, tokens: Tensor) -> Tensor:
        T, L = tokens.shape[1], self.config.num_hidden_layers
        x = self.model.embed_tokens(tokens)
        for layer in list(self.model.layers)[:L]:
            x = layer(x, self.cos[:T], self.sin[:T])
        return self.model.norm(x)

    def mtp(self, k: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        module = self.model.layers[self.config.num_hidden_layers + k - 1]
        assert isinstance(module, MTPModule)
        T = tokens.shape[1]
        return module.draft(self.model.embed_tokens(tokens), hidden, self.cos[:T], self.sin[:T])
