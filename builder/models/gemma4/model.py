"""Gemma-4's trunk in the step program.

Shapes: B slots, T tokens, E hidden size, H query heads, G heads of keys and values, D head width, P
values of a layer's own input.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from mtpbuild.builder.models.common.blocks import look_up, weigh_chosen
from mtpbuild.builder.models.common.causal_lm import CausalLM, GatherLogits
from mtpbuild.builder.models.common.collectives import all_gather
from mtpbuild.builder.models.common.layers import (
    MLP,
    Positions,
    RMSNorm,
    Rope,
    State,
    StateUpdates,
)
from mtpbuild.builder.models.common.precision import FLOATS, cast, parameter
from mtpbuild.builder.models.gemma4.config import Gemma4Config
from mtpbuild.plugins import (
    gelu_gate,
    grouped_attention_flat,
    grouped_rows,
    grouped_rows_write,
    norm_sum,
    soft_cap,
    softmax_route,
)
from mtpbuild.runtime.contract.state import name_layer_rows
from mtpbuild.runtime.ranks import ALONE, Ranks

Rows = tuple[Tensor, Tensor]  # a layer's cache, and the fresh rows in it


@dataclass(frozen=True)
class WindowPositions(Positions):
    """Positions with the angles of layers that see all rows, beside those of windows."""

    full: tuple[Tensor, Tensor] = field(kw_only=True)  # cos and sin [B, T, D / 2]
    ring: Tensor = field(kw_only=True)  # [B] start, or -1 in an idle slot
    # The rows of the last layer of each kind so far: full or not.
    shared: dict[bool, Rows] = field(default_factory=dict)


class TwoRopes(Rope):
    """The angles of both kinds of layers."""

    def __init__(self, c: Gemma4Config) -> None:
        super().__init__(c.rope, c.head_dim)
        self.full = Rope(c.full_rope, c.global_head_dim)

    def forward(
        self,
        start: Tensor,
        tokens: int,
        active: Tensor | None = None,
        end: int = 0,
        offset: int = 0,
    ) -> WindowPositions:
        """Place tokens as `Rope` does."""
        near = super().forward(start, tokens, active, end, offset)
        far = self.full(start, tokens, active, end, offset)
        ring = near.start if active is None else torch.where(active, start, -1)
        parts = {part.name: getattr(near, part.name) for part in fields(near)}
        return WindowPositions(**parts, full=(far.cos, far.sin), ring=ring)


class WindowAttention(nn.Module):
    """Attention of Gemma-4: to a window or to all rows, its own or an earlier layer's."""

    def __init__(self, c: Gemma4Config, layer: int) -> None:
        super().__init__()
        self.full, self.owns_rows = c.full_layers[layer], layer < c.first_shared
        self.heads, self.groups, self.width = (
            c.num_attention_heads, c.key_heads(layer), c.width(layer),
        )  # fmt: skip
        self.window = 0 if self.full else c.sliding_window
        self.shares_values = c.shares_values(layer)
        kept = self.groups * (1 if self.shares_values else 2) if self.owns_rows else 0
        self.qkv_proj = parameter(c.hidden_size, (self.heads + kept) * self.width)
        self.q_norm = RMSNorm(self.width, c.rms_norm_eps)
        self.k_norm = RMSNorm(self.width, c.rms_norm_eps) if self.owns_rows else None
        self.o_proj = parameter(self.heads * self.width, c.hidden_size)

    def write(
        self, x: Tensor, cache: Tensor | None, rows: WindowPositions
    ) -> tuple[Tensor, Tensor | None]:
        """Return the queries [B, T, H D] of x [B, T, E], and the cache with its rows, if any."""
        y = x @ self.qkv_proj
        cos, sin = rows.full if self.full else (rows.cos, rows.sin)
        sizes = {"heads": self.heads, "width": self.width, "eps": self.q_norm.eps}
        q_norm = self.q_norm.weight
        if self.k_norm is None or cache is None:
            q, _ = grouped_rows(y, q_norm, None, cos, sin, groups=0, **sizes)
            return q, None
        q, fresh, cache = grouped_rows_write(
            y,
            q_norm,
            self.k_norm.weight,
            cos,
            sin,
            cache,
            rows.start if self.full else rows.ring,
            groups=self.groups,
            norms_values=True,
            shares_values=self.shares_values,
            ring=not self.full,
            **sizes,
        )
        rows.shared[self.full] = (cache, fresh)
        return q, cache

    def attend(self, q: Tensor, rows: WindowPositions, first: Tensor, wider: int = 0) -> Tensor:
        """Attend with queries [B, T, H D], t to the fresh rows up to first [B] + t.

        wider: rows that are seen beyond the window.
        """
        cache, fresh = rows.shared[self.full]
        o = grouped_attention_flat(
            q,
            cache,
            fresh,
            rows.base,
            first,
            scale=1.0,
            heads=self.heads,
            groups=self.groups,
            window=self.window + wider if self.window else 0,
        )
        return o @ self.o_proj


class ResidualGate(nn.Module):
    """The router, which reads the residual stream by a norm of its own."""

    def __init__(self, c: Gemma4Config) -> None:
        super().__init__()
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.weight = parameter(c.hidden_size, c.n_routed_experts)
        self.scales = parameter(c.n_routed_experts)
        self.chosen = c.num_experts_per_tok

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and ids of a token's experts, both [.., k], for x [.., E]."""
        logits = cast(self.norm(x), torch.float32) @ self.weight.float()
        return softmax_route(logits, cast(self.scales, torch.float32), self.chosen)


class Experts(nn.Module):
    """The experts of a layer, which are computed beside its dense MLP."""

    by_kernels = ("gate_up_proj", "down_proj")

    def __init__(self, c: Gemma4Config) -> None:
        super().__init__()
        count, inner, E = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size
        self.gate = ResidualGate(c)
        self.gate_up_proj = parameter(count, E, 2 * inner)
        self.down_proj = parameter(count, inner, E)
        self.dense_norm, self.input_norm, self.norm = (RMSNorm(E, c.rms_norm_eps) for _ in range(3))

    def forward(self, x: Tensor, dense: Tensor) -> Tensor:
        """Add the experts' result for x [B, T, E] to that of the dense MLP, each normed."""
        weights, ids = self.gate(x)
        y = weigh_chosen(
            self.gate_up_proj, self.down_proj, self.input_norm(x), weights, ids, gelu=True
        )
        return norm_sum(self.dense_norm(dense), y, self.norm.weight, None, self.norm.eps)


class LayerInput(nn.Module):
    """The gated input that a layer has of its own."""

    def __init__(self, c: Gemma4Config) -> None:
        super().__init__()
        E, P = c.hidden_size, c.hidden_size_per_layer_input
        self.gate, self.projection = parameter(E, P), parameter(P, E)
        self.norm = RMSNorm(E, c.rms_norm_eps)

    def forward(self, x: Tensor, layer_input: Tensor, factor: Tensor) -> Tensor:
        """Add a token's input [B, T, P] to x [B, T, E]; the sum is times the factor."""
        y = gelu_gate(layer_input, x @ self.gate) @ self.projection
        return norm_sum(x, y, self.norm.weight, factor, self.norm.eps)


class GemmaLayer(nn.Module):
    """A layer whose branches are normed before and after; its whole result has a factor."""

    def __init__(self, c: Gemma4Config, layer: int) -> None:
        super().__init__()
        E, eps = c.hidden_size, c.rms_norm_eps
        self.input_layernorm = RMSNorm(E, eps)
        self.self_attn = WindowAttention(c, layer)
        self.post_attention_layernorm = RMSNorm(E, eps)
        self.pre_feedforward_layernorm = RMSNorm(E, eps)
        self.mlp = MLP(E, c.inner(layer), gelu=True)
        self.experts = Experts(c) if c.n_routed_experts else None
        self.post_feedforward_layernorm = RMSNorm(E, eps)
        self.layer_input = LayerInput(c) if c.hidden_size_per_layer_input else None
        self.layer_scalar = parameter(1)

    def forward(
        self,
        x: Tensor,
        cache: Tensor | None,
        rows: WindowPositions,
        layer_input: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute x [B, T, E]; layer_input [B, T, P]: what the layer has of its own."""
        q, cache = self.self_attn.write(self.input_layernorm(x), cache, rows)
        return self.finish(x, self.self_attn.attend(q, rows, rows.first), layer_input), cache

    def fill(self, x: Tensor, cache: Tensor, rows: WindowPositions) -> Tensor:
        """Write only the cache rows, which are all that a prompt needs of the last layer."""
        new = self.self_attn.write(self.input_layernorm(x), cache, rows)[1]
        assert new is not None
        return new

    def finish(self, x: Tensor, branch: Tensor, layer_input: Tensor | None = None) -> Tensor:
        """Add attention's branch [B, T, E], then the rest of the layer."""
        norm = self.post_attention_layernorm
        x = norm_sum(x, branch, norm.weight, None, norm.eps)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        if self.experts is not None:
            y = self.experts(x, y)
        norm = self.post_feedforward_layernorm
        if self.layer_input is None or layer_input is None:
            return norm_sum(x, y, norm.weight, self.layer_scalar, norm.eps)
        x = norm_sum(x, y, norm.weight, None, norm.eps)
        return self.layer_input(x, layer_input, self.layer_scalar)


class LayerInputs(nn.Module):
    """The inputs of all layers, from a token's rows in two tables."""

    def __init__(self, c: Gemma4Config) -> None:
        super().__init__()
        P, L = c.hidden_size_per_layer_input, c.num_hidden_layers
        self.width, self.layers = P, L
        self.table = parameter(c.vocab_size_per_layer_input, L * P)
        self.projection = parameter(c.hidden_size, L * P)
        self.norm = RMSNorm(P, c.rms_norm_eps)
        self.scale = c.hidden_size**-0.5

    def forward(self, tokens: Tensor, x: Tensor) -> Sequence[Tensor]:
        """Return the input [B, T, P] of each layer; x [B, T, E]: the tokens' embedding."""
        stored = look_up(self.table, tokens) * math.sqrt(self.width)
        projected = (x @ self.projection * self.scale).unflatten(-1, (self.layers, self.width))
        both = (self.norm(projected).flatten(-2) + stored) * 2**-0.5
        return both.split(self.width, dim=-1)


class Gemma4(CausalLM):
    """Gemma-4's text model."""

    config: Gemma4Config

    def __init__(self, c: Gemma4Config, ranks: Ranks = ALONE) -> None:
        super().__init__(c, (), (), TwoRopes(c), ranks)
        self.layers = nn.ModuleList(GemmaLayer(c, i) for i in range(c.num_hidden_layers))
        self.layer_inputs = LayerInputs(c) if c.hidden_size_per_layer_input else None
        # Of an embedding, rounded as it is; so does transformers.
        root = torch.tensor(math.sqrt(c.hidden_size), device="cpu")
        self.factors = {dtype: root.to(dtype).item() for dtype in FLOATS.values()}

    def embed(self, tokens: Tensor, table: Tensor | None = None) -> Tensor:
        x = super().embed(tokens, table)
        return x * self.factors[x.dtype]

    def forward(self, tokens: Tensor, state: State, rows: Positions) -> tuple[Tensor, StateUpdates]:
        x, updates = self.run(tokens, state, rows, len(self.layers))
        return self.norm(x), updates

    def fill(self, tokens: Tensor, state: State, rows: Positions) -> StateUpdates:
        last = self.config.first_shared - 1  # no later layer writes rows
        x, updates = self.run(tokens, state, rows, last)
        layer, name = self.layers[last], name_layer_rows(last)
        assert isinstance(layer, GemmaLayer)
        assert isinstance(rows, WindowPositions)
        updates.written[name] = layer.fill(x, state[name], rows)
        return updates

    def run(
        self, tokens: Tensor, state: State, rows: Positions, count: int
    ) -> tuple[Tensor, StateUpdates]:
        """Run the first `count` layers on tokens [B, T]."""
        x, updates = self.embed(tokens), StateUpdates()
        inputs: Sequence[Tensor | None] = [None] * count
        if self.layer_inputs is not None:
            inputs = self.layer_inputs(tokens, x)
        for i in range(count):
            name = name_layer_rows(i)
            x, cache = self.layers[i](x, state.get(name), rows, inputs[i])
            if cache is not None:
                updates.written[name] = cache
        return x, updates

    def place_head(
        self, rows: Positions, lengths: Tensor, last: Tensor, active: Tensor
    ) -> tuple[WindowPositions, Tensor]:
        assert isinstance(rows, WindowPositions)
        placed = self.rope(lengths, 1, active)
        return replace(placed, base=rows.base, shared=rows.shared), last

    def run_head(
        self, embedding: Tensor, hidden: Tensor, rows: tuple[WindowPositions, Tensor]
    ) -> tuple[Tensor, Tensor]:
        x, next_hidden = self.mtp[0](embedding, hidden, *rows)
        return x, next_hidden

    def draft_logits(self, j: int, hidden: Tensor, gather: GatherLogits = all_gather) -> Tensor:
        head: Any = self.mtp[j]
        if head.groups is None:
            return super().draft_logits(j, hidden, gather)
        return cast(head.groups.logits(hidden, head.lm_head), torch.float32)

    def count_bound_rows(self, state: State) -> int:
        return state[name_layer_rows(self.config.full_layers.index(True))].shape[2]

    def logits(self, hidden: Tensor, gather: GatherLogits = all_gather) -> Tensor:
        logits = super().logits(hidden, gather)
        cap = self.config.final_logit_softcapping
        return soft_cap(logits, cap) if cap else logits
