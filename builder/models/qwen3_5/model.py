"""Qwen3.5 with its MTP module: layers with a gated delta rule or with gated attention.

Shapes: B slots, T tokens, E hidden size, C channels of the convolution, H value heads of V values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.grouped import GroupedAttention
from mtpbuild.builder.models.common.layers import (
    MLP,
    DecoderLayer,
    MTPModule,
    Positions,
    RecurrentLayer,
    RMSNorm,
    Rope,
    State,
    sum_over_ranks,
)
from mtpbuild.builder.models.common.moe import MoE, feed_forward
from mtpbuild.builder.models.common.precision import cast, parameter
from mtpbuild.builder.models.qwen3_5.config import STATES, Qwen35Config
from mtpbuild.plugins import causal_conv, delta_advance, delta_rule, last_inputs
from mtpbuild.runtime.ranks import ALONE, Ranks


class GatedMLP(MLP):
    """A shared expert whose output is weighed by a gate, per token."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__(hidden, inner)
        self.gate = parameter(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.gate).sigmoid() * super().forward(x)


class GatedDelta(nn.Module):
    """A gated delta rule over the convolved queries, keys and values of all tokens.

    A rank has whole key heads, with the value heads that they serve.
    """

    def __init__(self, c: Qwen35Config, ranks: Ranks) -> None:
        super().__init__()
        E, H, V = c.hidden_size, c.linear_num_value_heads // ranks.parts, c.linear_value_head_dim
        # Widths of the convolution's inputs, and of the gates.
        self.sizes = [c.channels // ranks.parts, H * V]
        self.in_proj = parameter(E, sum(self.sizes))
        self.in_proj_ba = parameter(E, 2 * H)
        self.conv = parameter(c.linear_conv_kernel_dim, self.sizes[0])
        self.decay_rate, self.decay_bias = parameter(H), parameter(H)
        self.norm = RMSNorm(V, c.rms_norm_eps)
        self.out_proj = parameter(H * V, E)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        inputs, z = (x @ self.in_proj).split(self.sizes, dim=-1)
        inputs = cast(inputs, torch.float32)
        tokens = {
            "inputs": inputs,
            "mixed": causal_conv(inputs, state["conv"], cast(self.conv, torch.float32)),
            "ba": cast(x @ self.in_proj_ba, torch.float32),
        }
        results = delta_rule(tokens["mixed"], tokens["ba"], *self.decay, state["delta"])
        o, tokens["all"] = results  # [B, T, H, V], and the state after all tokens [B, H, K, V]
        gated = self.norm(cast(o, x.dtype)).flatten(2) * F.silu(z)
        return gated @ self.out_proj, tokens

    @property
    def decay(self) -> tuple[Tensor, Tensor]:
        return self.decay_rate, self.decay_bias

    def advance(self, state: State, tokens: State, n: Tensor) -> State:
        """Return the states after the first n [B] tokens."""
        new = delta_advance(tokens["mixed"], tokens["ba"], *self.decay, state["delta"], n)
        return {"conv": last_inputs(state["conv"], tokens["inputs"], n), "delta": new}


class DeltaLayer(RecurrentLayer):
    """A pre-norm block like `DecoderLayer`, with a delta rule instead of attention."""

    states = STATES

    def __init__(self, c: Qwen35Config, mlp: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.linear_attn = GatedDelta(c, ranks)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, state: State, rows: Positions) -> tuple[Tensor, State]:
        mixed, tokens = self.linear_attn(self.input_layernorm(x), state)
        x = x + sum_over_ranks(mixed, self.ranks)
        fed = self.mlp(self.post_attention_layernorm(x))
        return x + sum_over_ranks(fed, self.ranks), tokens

    def advance(self, state: State, tokens: State, n: Tensor) -> State:
        return self.linear_attn.advance(state, tokens, n)

    def advance_all(self, state: State, tokens: State, n: Tensor) -> State:
        tail = last_inputs(state["conv"], tokens["inputs"], n)
        return {"conv": tail, "delta": tokens["all"]}


class Qwen35(CausalLM):
    """Qwen3.5, or the part of it that one of `ranks` computes."""

    config: Qwen35Config

    def __init__(self, c: Qwen35Config, ranks: Ranks = ALONE) -> None:
        def make_mlp(layer: int) -> nn.Module:
            mlp = feed_forward(c, layer, ranks)
            inner = c.shared_expert_intermediate_size
            if isinstance(mlp, MoE) and inner:
                mlp.shared_experts = GatedMLP(c.hidden_size, inner // ranks.parts)
            return mlp

        def layer(i: int) -> DecoderLayer | RecurrentLayer:
            if c.delta_layers[i]:
                return DeltaLayer(c, make_mlp(i), ranks)
            return DecoderLayer(c, GroupedAttention(c, ranks), make_mlp(i), ranks)

        L = c.num_hidden_layers
        indices = range(L, L + c.num_nextn_predict_layers)
        modules = [MTPModule(c, GroupedAttention(c, ranks), make_mlp(i), ranks) for i in indices]
        super().__init__(c, map(layer, range(L)), modules, Rope(c.rope, c.rotary_dim), ranks)
