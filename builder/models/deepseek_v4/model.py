"""DeepSeek-V4's trunk and MTP module in the step program.

Shapes: B slots, T tokens, E hidden size, N residual streams.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mtpbuild.builder.models.common.blocks import weigh_chosen
from mtpbuild.builder.models.common.causal_lm import CausalLM, GatherLogits
from mtpbuild.builder.models.common.collectives import all_gather
from mtpbuild.builder.models.common.layers import (
    MLP,
    DraftLayer,
    Positions,
    RMSNorm,
    State,
    StateUpdates,
)
from mtpbuild.builder.models.common.moe import ExpertStack
from mtpbuild.builder.models.common.precision import cast, parameter
from mtpbuild.builder.models.deepseek_v4.attention import StreamAttention
from mtpbuild.builder.models.deepseek_v4.config import DeepseekV4Config
from mtpbuild.builder.models.deepseek_v4.rows import (
    COMPRESSED,
    OPEN,
    StreamPositions,
    StreamRope,
)
from mtpbuild.builder.models.deepseek_v4.streams import Mixer, StreamHead, Streams
from mtpbuild.plugins import take_rows
from mtpbuild.plugins.moe.op import root_route, with_shared
from mtpbuild.runtime.contract.state import name_layer_state
from mtpbuild.runtime.ranks import ALONE, Ranks


class StreamGate(nn.Module):
    """A router by sqrt(softplus); a hashed one weighs the experts that belong to the token."""

    def __init__(self, c: DeepseekV4Config, layer: int) -> None:
        super().__init__()
        self.chosen, self.factor = c.num_experts_per_tok, c.routed_scaling_factor
        self.num_shared_in_stack = 0
        self.weight = parameter(c.hidden_size, c.n_routed_experts)
        self.bias = None if c.is_hashed(layer) else parameter(c.n_routed_experts)
        if self.bias is None:
            self.table = parameter(c.vocab_size, c.num_experts_per_tok)

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and ids of a token's experts, both [B, T, k]."""
        logits = cast(x, torch.float32) @ self.weight
        choice = (None, self.table, tokens) if self.bias is None else (self.bias, None, None)
        weights, ids = root_route(logits, *choice, self.chosen, self.factor)
        return with_shared(weights, ids, self.weight.shape[1], self.num_shared_in_stack)


class ClampedExperts(ExpertStack):
    """Routed experts and a shared one, whose gates and ups are clamped."""

    def __init__(self, c: DeepseekV4Config, layer: int) -> None:
        super().__init__()
        count, inner, E = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size
        self.limit = c.swiglu_limit
        self.gate = StreamGate(c, layer)
        self.gate_up_proj = parameter(count, E, 2 * inner)
        self.down_proj = parameter(count, inner, E)
        self.shared_experts = MLP(E, inner * c.n_shared_experts, limit=self.limit)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Sum the experts of x [B, T, E]; tokens [B, T]: their ids."""
        routes, ids = self.gate(x, tokens)
        weights = self.gate_up_proj, self.down_proj
        y = weigh_chosen(*weights, x, routes, ids, limit=self.limit)
        return y if self.shared_experts is None else y + self.shared_experts(x)


class StreamLayer(nn.Module):
    """A layer over residual streams: attention, then experts."""

    def __init__(self, c: DeepseekV4Config, layer: int) -> None:
        super().__init__()
        E, eps = c.hidden_size, c.rms_norm_eps
        self.attn_hc, self.ffn_hc = Mixer(c), Mixer(c)
        self.input_layernorm = RMSNorm(E, eps)
        self.self_attn = StreamAttention(c, layer)
        self.post_attention_layernorm = RMSNorm(E, eps)
        self.mlp = ClampedExperts(c, layer)

    def forward(
        self, streams: Streams, tokens: Tensor, old: State, rows: StreamPositions
    ) -> tuple[Streams, State]:
        """Compute the streams after the layer; old: its caches, of which new ones are returned."""
        x, y, weights = self.attn_hc(streams, self.input_layernorm)
        new, latent, fresh = self.write(y, old, rows)
        y = self.self_attn.attend(y, latent, rows, new, fresh, rows.first)
        return self.finish(Streams(x, (y, weights)), tokens), new

    def fill(self, streams: Streams, old: State, rows: StreamPositions) -> State:
        """Write only the caches."""
        return self.write(self.attn_hc(streams, self.input_layernorm)[1], old, rows)[0]

    def write(self, y: Tensor, old: State, rows: StreamPositions) -> tuple[State, Tensor, Tensor]:
        """Return the caches after y [B, T, E], the queries' latent, and the fresh rows."""
        latent, fresh, cache = self.self_attn.write(y, old["kv"], rows, rows.ring, ring=True)
        compressor = self.self_attn.compressor
        more = compressor.write(y, old, rows) if compressor else {}
        return {"kv": cache} | more, latent, fresh

    def finish(self, streams: Streams, tokens: Tensor) -> Streams:
        x, y, weights = self.ffn_hc(streams, self.post_attention_layernorm)
        return Streams(x, (self.mlp(y, tokens), weights))


class StreamModule(DraftLayer):
    """The MTP module: a layer without compressed rows over a token and the streams before it."""

    def __init__(self, c: DeepseekV4Config, layer: int) -> None:
        nn.Module.__init__(self)
        E, eps = c.hidden_size, c.rms_norm_eps
        self.streams = c.hc_mult
        self.enorm, self.hnorm = RMSNorm(E, eps), RMSNorm(E, eps)
        self.e_proj, self.h_proj = parameter(E, E), parameter(E, E)
        self.layer = StreamLayer(c, layer)
        self.hc_head, self.norm = StreamHead(c), RMSNorm(E, eps)
        self.embed_tokens = None
        self.lm_head = None

    def combine_inputs(self, embedding: Tensor, hidden: Tensor, rows: Positions) -> Tensor:
        streams = self.hnorm(hidden.unflatten(-1, (self.streams, -1))) @ self.h_proj
        return (streams + (self.enorm(embedding) @ self.e_proj)[..., None, :]).flatten(2)

    def forward(self, x: Tensor, cache: Tensor, rows: Positions) -> tuple[Tensor, Tensor]:
        assert isinstance(rows, StreamPositions)
        y, weights, latent, cache, fresh = self.write(x, cache, rows)
        return self.run(x, y, weights, latent, rows, cache, fresh, rows.first), cache

    def fill(self, x: Tensor, cache: Tensor, rows: Positions) -> Tensor:
        assert isinstance(rows, StreamPositions)
        return self.write(x, cache, rows)[3]

    def forward_last(
        self, x: Tensor, cache: Tensor, rows: Positions, at: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(rows, StreamPositions)
        y, weights, latent, cache, fresh = self.write(x, cache, rows)
        cos, sin, x, y, weights, latent = (
            take_rows(part, at, 1) for part in (rows.cos, rows.sin, x, y, weights, latent)
        )
        last = replace(rows, cos=cos, sin=sin)
        return self.run(x, y, weights, latent, last, cache, fresh, at), cache

    def forward_uncached(
        self, x: Tensor, cache: Tensor, side: Tensor | None, rows: Positions
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(rows, StreamPositions)
        _, y, weights = self.layer.attn_hc(Streams(x), self.layer.input_layernorm)
        latent, row = self.layer.self_attn.project(y, rows)
        side = row if side is None else torch.cat([side, row], dim=2)
        place = rows.first, False
        return self.run(x, y, weights, latent, rows, cache, side, *place), side

    def write(self, x: Tensor, cache: Tensor, rows: StreamPositions) -> tuple[Tensor, ...]:
        """Return the attention's input, its result's weights, latent, cache and fresh rows."""
        _, y, weights = self.layer.attn_hc(Streams(x), self.layer.input_layernorm)
        latent, fresh, cache = self.layer.self_attn.write(y, cache, rows, rows.start, ring=False)
        return y, weights, latent, cache, fresh

    def run(
        self,
        x: Tensor,
        y: Tensor,
        weights: Tensor,
        latent: Tensor,
        rows: StreamPositions,
        cache: Tensor,
        fresh: Tensor,
        first: Tensor,
        written: bool = True,
    ) -> Tensor:
        """Return the streams after the layer, from what `write` returned."""
        caches = {"kv": cache}
        y = self.layer.self_attn.attend(y, latent, rows, caches, fresh, first, written)
        tokens = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)  # none is hashed
        return self.layer.finish(Streams(x, (y, weights)), tokens).join()

    def compute_next_hidden(self, x: Tensor) -> Tensor:
        return x

    def compute_head_input(self, hidden: Tensor) -> Tensor:
        head: Tensor = self.hc_head(hidden, self.norm)
        return head


class DeepseekV4(CausalLM):
    """DeepSeek-V4."""

    config: DeepseekV4Config

    def __init__(self, c: DeepseekV4Config, ranks: Ranks = ALONE) -> None:
        L = c.num_hidden_layers
        modules = (StreamModule(c, L + j) for j in range(c.num_nextn_predict_layers))
        super().__init__(c, (), modules, StreamRope(c), ranks)
        self.layers = nn.ModuleList(StreamLayer(c, i) for i in range(L))
        self.hc_head = StreamHead(c)

    def forward(self, tokens: Tensor, state: State, rows: Positions) -> tuple[Tensor, StateUpdates]:
        taps = list[Tensor]()
        streams, updates = self.run(tokens, state, rows, len(self.layers), taps)
        hidden = streams.join()
        if self.join_taps is not None:
            hidden = torch.cat([hidden, self.join_taps(taps, hidden)], dim=-1)
        return hidden, updates

    def fill(self, tokens: Tensor, state: State, rows: Positions) -> StateUpdates:
        last = len(self.layers) - 1
        streams, updates = self.run(tokens, state, rows, last)
        layer: Any = self.layers[last]
        new = layer.fill(streams, self.read_states(last, state), rows)
        updates.written.update(name_states(new, last))
        return updates

    def run(
        self,
        tokens: Tensor,
        state: State,
        rows: Positions,
        count: int,
        taps: list[Tensor] | None = None,
    ) -> tuple[Streams, StateUpdates]:
        """Run the first `count` layers on tokens [B, T].

        taps: gets the means [B, T, E] of the streams that enter the layers that a head reads.
        """
        streams = Streams(torch.cat(self.config.hc_mult * [self.embed(tokens)], dim=-1))
        updates = StateUpdates()
        means = dict[int, Tensor]()
        for i in range(count):
            if i in self.taps:
                means[i] = streams.average(self.config.hc_mult)
            streams, new = self.layers[i](streams, tokens, self.read_states(i, state), rows)
            updates.written.update(name_states(new, i))
        if taps is not None and self.taps:
            means[count] = streams.average(self.config.hc_mult)
            taps += [means[i] for i in self.taps]
        return streams, updates

    def read_states(self, layer: int, state: State) -> State:
        """Return a layer's caches under its own names."""
        names = ("kv", COMPRESSED, OPEN) if self.config.ratio(layer) else ("kv",)
        return {name: state[name_layer_state(name, layer)] for name in names}

    def count_bound_rows(self, state: State) -> int:
        layer = next(i for i, ratio in enumerate(self.config.ratios) if ratio)
        return state[name_layer_state(COMPRESSED, layer)].shape[2]

    def logits(self, hidden: Tensor, gather: GatherLogits = all_gather) -> Tensor:
        if self.join_taps is not None:
            hidden = hidden[..., : self.config.hc_mult * self.config.hidden_size]
        return self.head(self.hc_head(hidden, self.norm), self.lm_head, gather)


def name_states(new: State, layer: int) -> State:
    """Return a layer's caches under the engine's names."""
    return {name_layer_state(name, layer): tensor for name, tensor in new.items()}
