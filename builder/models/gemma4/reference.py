"""The plain model: Gemma-4 over whole sequences, without caches."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpbuild.builder.models.common.plain import (
    PlainAttention,
    PlainLM,
    PlainMLP,
    make_norm,
    weigh_by_expert,
)
from mtpbuild.builder.models.common.rope import compute_rope_tables, rotate
from mtpbuild.builder.models.gemma4.config import Gemma4Config


class GeluMLP(PlainMLP):
    def forward(self, x: Tensor) -> Tensor:
        gate = F.gelu(self.gate_proj(x), approximate="tanh")
        y: Tensor = self.down_proj(gate * self.up_proj(x))
        return y


class PlainWindowAttention(PlainAttention):
    """Attention to a window or to all earlier tokens, with a layer's own keys or another's."""

    def __init__(self, c: Gemma4Config, layer: int) -> None:
        super().__init__()
        E, H, G, D = c.hidden_size, c.num_attention_heads, c.key_heads(layer), c.width(layer)
        self.sizes = H, G, D
        self.full, self.window = c.full_layers[layer], c.sliding_window
        self.q_proj, self.q_norm = nn.Linear(E, H * D, bias=False), make_norm(c, D)
        self.o_proj = nn.Linear(H * D, E, bias=False)
        self.eps = c.rms_norm_eps
        self.owns_rows = layer < c.first_shared
        if self.owns_rows:
            self.k_proj, self.k_norm = nn.Linear(E, G * D, bias=False), make_norm(c, D)
            self.v_proj = None if c.shares_values(layer) else nn.Linear(E, G * D, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, shared: dict[bool, tuple[Tensor, Tensor]]
    ) -> Tensor:
        H, G, D = self.sizes
        q = self.q_norm(self.q_proj(x).unflatten(-1, (H, D))).transpose(1, 2)
        q = rotate(q, cos, sin, interleave=False)
        if self.owns_rows:
            raw = self.k_proj(x)
            v = (raw if self.v_proj is None else self.v_proj(x)).unflatten(-1, (G, D))
            v = F.rms_norm(v, (D,), None, self.eps).transpose(1, 2)
            k = self.k_norm(raw.unflatten(-1, (G, D))).transpose(1, 2)
            shared[self.full] = rotate(k, cos, sin, interleave=False), v
        k, v = (part.repeat_interleave(H // G, 1) for part in shared[self.full])
        T = x.shape[1]
        ages = torch.arange(T)[:, None] - torch.arange(T)
        seen = (ages >= 0) & (self.full | (ages < self.window))
        o = self.attend(q, k, v, seen, scale=1.0)
        y: Tensor = self.o_proj(o.transpose(1, 2).flatten(2))
        return y


class PlainSoftmaxRouter(nn.Module):
    """The router, which reads the residual stream by a norm without weight."""

    def __init__(self, c: Gemma4Config) -> None:
        super().__init__()
        self.config = c
        self.proj = nn.Linear(c.hidden_size, c.n_routed_experts, bias=False)
        self.scale = nn.Parameter(torch.ones(c.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(c.n_routed_experts))

    def forward(self, x: Tensor) -> Tensor:
        """Return the experts' weights [..., experts] for x [..., hidden]: 0 if not chosen."""
        c = self.config
        normed = F.rms_norm(x, (c.hidden_size,), None, c.rms_norm_eps)
        shares = self.proj(normed * self.scale * c.hidden_size**-0.5).softmax(-1)
        best, ids = shares.topk(c.num_experts_per_tok, dim=-1)
        best = best / best.sum(-1, keepdim=True) * self.per_expert_scale[ids]
        return torch.zeros_like(shares).scatter(-1, ids, best)


class PlainGemmaLayer(nn.Module):
    """A layer, by the checkpoint's names."""

    def __init__(self, c: Gemma4Config, layer: int) -> None:
        super().__init__()
        E, P = c.hidden_size, c.hidden_size_per_layer_input
        self.input_layernorm, self.post_attention_layernorm = make_norm(c), make_norm(c)
        self.pre_feedforward_layernorm = make_norm(c)
        self.post_feedforward_layernorm = make_norm(c)
        self.self_attn = PlainWindowAttention(c, layer)
        self.mlp = GeluMLP(E, c.inner(layer))
        self.layer_scalar = nn.Parameter(torch.ones(1))
        self.mixes, self.has_input = c.n_routed_experts > 0, P > 0
        if self.mixes:
            self.router = PlainSoftmaxRouter(c)
            experts = (GeluMLP(E, c.moe_intermediate_size) for _ in range(c.n_routed_experts))
            self.experts = nn.ModuleList(experts)
            self.post_feedforward_layernorm_1 = make_norm(c)
            self.pre_feedforward_layernorm_2 = make_norm(c)
            self.post_feedforward_layernorm_2 = make_norm(c)
        if self.has_input:
            self.per_layer_input_gate = nn.Linear(E, P, bias=False)
            self.per_layer_projection = nn.Linear(P, E, bias=False)
            self.post_per_layer_input_norm = make_norm(c)

    def forward(
        self,
        x: Tensor,
        layer_input: Tensor | None,
        angles: tuple[Tensor, Tensor],
        shared: dict[bool, tuple[Tensor, Tensor]],
    ) -> Tensor:
        branch = self.self_attn(self.input_layernorm(x), *angles, shared)
        x = x + self.post_attention_layernorm(branch)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        if self.mixes:
            weights = self.router(x)
            mixed = weigh_by_expert(self.experts, self.pre_feedforward_layernorm_2(x), weights)
            mixed = self.post_feedforward_layernorm_2(mixed)
            y = self.post_feedforward_layernorm_1(y) + mixed
        x = x + self.post_feedforward_layernorm(y)
        if layer_input is not None:
            gate = F.gelu(self.per_layer_input_gate(x), approximate="tanh")
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gate * layer_input))
        return x * self.layer_scalar


class PlainGemmaTrunk(nn.Module):
    """The modules under the checkpoint's `model.` prefix."""

    def __init__(self, c: Gemma4Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        layers = range(c.num_hidden_layers)
        self.layers = nn.ModuleList(PlainGemmaLayer(c, i) for i in layers)
        self.norm = make_norm(c)
        if P := c.hidden_size_per_layer_input:
            values = P * c.num_hidden_layers
            self.embed_tokens_per_layer = nn.Embedding(c.vocab_size_per_layer_input, values)
            self.per_layer_model_projection = nn.Linear(c.hidden_size, values, bias=False)
            self.per_layer_projection_norm = make_norm(c, P)


class PlainGemma4(PlainLM):
    """Gemma-4's text model over whole sequences."""

    config: Gemma4Config

    def __init__(self, c: Gemma4Config) -> None:
        super().__init__()
        self.config = c
        self.model = PlainGemmaTrunk(c)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the first layer's input [B, T, hidden], and behind it those that layers own."""
        x: Tensor = self.model.embed_tokens(tokens) * math.sqrt(self.config.hidden_size)
        return torch.cat([x, self.make_inputs(tokens, x)], -1)

    def run_layer(self, i: int, x: Tensor) -> Tensor:
        """Run main layer i on x [B, T, hidden], behind which is what it and later layers read.

        These are the inputs that layers own, and the rows that are shared, from the layers that
        wrote them. The last layer returns [B, T, hidden] alone.
        """
        c, full = self.config, self.config.full_layers[i]
        sources = sorted(c.last_rows.values()) if c.num_kv_shared_layers else []
        written = [layer for layer in sources if layer < i]
        sizes = [2 * c.key_heads(layer) * c.width(layer) for layer in written]
        input_width = c.num_hidden_layers * c.hidden_size_per_layer_input
        x, inputs, *rows = x.split([c.hidden_size, input_width, *sizes], -1)
        shared = {
            c.full_layers[layer]: unpack_rows(part, c.key_heads(layer))
            for layer, part in zip(written, rows, strict=True)
        }
        rope, width = (c.full_rope, c.global_head_dim) if full else (c.rope, c.head_dim)
        angles = compute_rope_tables(rope, width, x.shape[1])
        by_layer = inputs.unflatten(-1, (c.num_hidden_layers, -1)) if input_width else None
        layer_input = None if by_layer is None else by_layer[:, :, i]
        y: Tensor = self.model.layers[i](x, layer_input, angles, shared)
        if i == c.num_hidden_layers - 1:
            return y
        if i in sources:
            rows.append(pack_rows(*shared[full]))
        return torch.cat([y, inputs, *rows], -1)

    def main(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for i in range(self.config.num_hidden_layers):
            x = self.run_layer(i, x)
        y: Tensor = self.model.norm(x)
        return y

    def make_inputs(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Return the inputs [B, T, layers * P] that layers have of their own."""
        c, P = self.config, self.config.hidden_size_per_layer_input
        if not P:
            return x[..., :0]
        stored = self.model.embed_tokens_per_layer(tokens) * math.sqrt(P)
        projected = self.model.per_layer_model_projection(x) * c.hidden_size**-0.5
        normed = self.model.per_layer_projection_norm(projected.unflatten(-1, (-1, P)))
        inputs: Tensor = (normed.flatten(-2) + stored) * 2**-0.5
        return inputs

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.lm_head(hidden)
        cap = self.config.final_logit_softcapping
        return (logits / cap).tanh() * cap if cap else logits


def pack_rows(keys: Tensor, values: Tensor) -> Tensor:
    """Return rows [B, T, 2 * G * D] of keys and values [B, G, T, D]."""
    return torch.stack([keys, values], 2).permute(0, 3, 2, 1, 4).flatten(2)


def unpack_rows(rows: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [B, heads, T, D] of rows [B, T, 2 * heads * D]."""
    keys, values = rows.unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4)
    return keys, values
