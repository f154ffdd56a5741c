"""DeepSeek-V4's trunk and MTP module in the step program.

Shapes: B slots, T tokens, E hidden size, N residual streams.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpbuild.builder.models.common.blocks import look_up, weigh_chosen
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
from mtpbuild.builder.models.common.precision import cast, parameter
from mtpbuild.builder.models.deepseek_v4.attention import StreamAttention
from mtpbuild.builder.models.deepseek_v4.config import DeepseekV4Config
from mtpbuild.builder.models.deepseek_v4.rows import (
    COMPRESSED,
    OPEN,
    StreamPositions,
    StreamRope,
    read_ring,
    read_rows,
)
from mtpbuild.builder.models.deepseek_v4.streams import Mixer, StreamHead, join_branch
from mtpbuild.plugins import kv_write, take_rows
from mtpbuild.plugins.grouped_rows.op import write_ring
from mtpbuild.runtime.contract.state import name_layer_state
from mtpbuild.runtime.ranks import ALONE, Ranks


class StreamGate(nn.Module):
    """A router by sqrt(softplus); a hashed one weighs the experts that belong to the token."""

    def __init__(self, c: DeepseekV4Config, layer: int) -> None:
        super().__init__()
        self.chosen, self.factor = c.num_experts_per_tok, c.routed_scaling_factor
        self.weight = parameter(c.hidden_size, c.n_routed_experts)
        self.bias = None if c.is_hashed(layer) else parameter(c.n_routed_experts)
        if self.bias is None:
            self.table = parameter(c.vocab_size, c.num_experts_per_tok)

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and ids of a token's experts, both [B, T, k]."""
        scores = F.softplus(cast(x, torch.float32) @ self.weight.float()).sqrt()
        if self.bias is None:
            ids = look_up(self.table, tokens).long()
        else:
            biased = scores + self.bias
            ids = biased.sort(dim=-1, descending=True, stable=True).indices[..., : self.chosen]
        weights = scores.gather(-1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.factor, ids.int()


class ClampedExperts(nn.Module):
    """Routed experts and a shared one, whose gates and ups are clamped."""

    by_kernels = ("gate_up_proj", "down_proj")

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
        return y + self.shared_experts(x)


class StreamLayer(nn.Module):
    """A layer over residual streams: attention, then experts."""

    def __init__(self, c: DeepseekV4Config, layer: int) -> None:
        super().__init__()
        E, eps = c.hidden_size, c.rms_norm_eps
        self.window = c.sliding_window
        self.attn_hc, self.ffn_hc = Mixer(c), Mixer(c)
        self.input_layernorm = RMSNorm(E, eps)
        self.self_attn = StreamAttention(c, layer)
        self.post_attention_layernorm = RMSNorm(E, eps)
        self.mlp = ClampedExperts(c, layer)

    def forward(
        self, x: Tensor, tokens: Tensor, old: State, rows: StreamPositions
    ) -> tuple[Tensor, State]:
        """Compute x [B, T, N, E]; old: the layer's caches, of which new ones are returned."""
        y, post, comb = self.attn_hc(x)
        y = self.input_layernorm(y)
        new, latent, fresh = self.write(y, old, rows)
        before = cast(read_ring(new["kv"], self.place_before(rows)), y.dtype)
        near = torch.cat([before, fresh], dim=1)
        y = self.self_attn.attend(y, latent, rows, near, rows.first, new.get(COMPRESSED))
        return self.finish(join_branch(x, y, post, comb), tokens), new

    def fill(self, x: Tensor, old: State, rows: StreamPositions) -> State:
        """Write only the caches."""
        return self.write(self.input_layernorm(self.attn_hc(x)[0]), old, rows)[0]

    def write(self, y: Tensor, old: State, rows: StreamPositions) -> tuple[State, Tensor, Tensor]:
        """Return the caches after y [B, T, E], the queries' latent, and the fresh rows."""
        latent, fresh = self.self_attn.project(y, rows)
        rounded = cast(fresh, old["kv"].dtype)
        new = {"kv": write_ring(old["kv"], rounded[:, None], rows.ring)}
        return new | self.self_attn.compress(y, old, rows), latent, cast(rounded, fresh.dtype)

    def place_before(self, rows: StreamPositions) -> Tensor:
        """Return the positions [B, W - 1] before the base that a window sees."""
        return rows.base[:, None] + torch.arange(1 - self.window, 0, device=rows.base.device)

    def finish(self, x: Tensor, tokens: Tensor) -> Tensor:
        y, post, comb = self.ffn_hc(x)
        return join_branch(x, self.mlp(self.post_attention_layernorm(y), tokens), post, comb)


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
        return streams + (self.enorm(embedding) @ self.e_proj)[..., None, :]

    def forward(self, x: Tensor, cache: Tensor, rows: Positions) -> tuple[Tensor, Tensor]:
        assert isinstance(rows, StreamPositions)
        y, post, comb = self.layer.attn_hc(x)
        latent, cache, fresh = self.write(y, cache, rows)
        return self.run(x, (y, latent), (post, comb), rows, cache, fresh, rows.first), cache

    def fill(self, x: Tensor, cache: Tensor, rows: Positions) -> Tensor:
        assert isinstance(rows, StreamPositions)
        return self.write(self.layer.attn_hc(x)[0], cache, rows)[1]

    def forward_last(
        self, x: Tensor, cache: Tensor, rows: Positions, at: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(rows, StreamPositions)
        y, post, comb = self.layer.attn_hc(x)
        latent, cache, fresh = self.write(y, cache, rows)
        cos, sin, x, y, latent, post, comb = (
            take_rows(part.flatten(2), at, 1).unflatten(2, part.shape[2:])
            for part in (rows.cos, rows.sin, x, y, latent, post, comb)
        )
        last = replace(rows, cos=cos, sin=sin)
        return self.run(x, (y, latent), (post, comb), last, cache, fresh, at), cache

    def forward_uncached(
        self, x: Tensor, cache: Tensor, side: Tensor | None, rows: Positions
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(rows, StreamPositions)
        y, post, comb = self.layer.attn_hc(x)
        latent, row = self.layer.self_attn.project(self.layer.input_layernorm(y), rows)
        side = row if side is None else torch.cat([side, row], dim=1)
        return self.run(x, (y, latent), (post, comb), rows, cache, side, rows.first), side

    def write(
        self, y: Tensor, cache: Tensor, rows: StreamPositions
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries' latent, the cache and the fresh rows of y [B, T, E]."""
        latent, fresh = self.layer.self_attn.project(self.layer.input_layernorm(y), rows)
        rounded = cast(fresh, cache.dtype)
        cache = kv_write(cache, rounded[:, None], rows.start)
        return latent, cache, cast(rounded, fresh.dtype)

    def run(
        self,
        x: Tensor,
        inputs: tuple[Tensor, Tensor],
        weights: tuple[Tensor, Tensor],
        rows: StreamPositions,
        cache: Tensor,
        fresh: Tensor,
        first: Tensor,
    ) -> Tensor:
        """Return the streams after the layer, from its input, its latent and its weights."""
        before = read_rows(cache, self.layer.place_before(rows).clamp(min=0))
        near = torch.cat([cast(before, fresh.dtype), fresh], dim=1)
        y = self.layer.self_attn.attend(*inputs, rows, near, first, None)
        tokens = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)  # none is hashed
        return self.layer.finish(join_branch(x, y, *weights), tokens)

    def compute_next_hidden(self, x: Tensor) -> Tensor:
        return x.flatten(2)

    def compute_head_input(self, hidden: Tensor) -> Tensor:
        return self.norm(self.hc_head(hidden))


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
        x, updates = self.run(tokens, state, rows, len(self.layers), taps)
        streams = x.flatten(2)
        if self.join_taps is None:
            return streams, updates
        return torch.cat([streams, self.join_taps(taps, streams)], dim=-1), updates

    def fill(self, tokens: Tensor, state: State, rows: Positions) -> StateUpdates:
        last = len(self.layers) - 1
        x, updates = self.run(tokens, state, rows, last)
        layer: Any = self.layers[last]
        updates.written.update(
            name_states(layer.fill(x, self.read_states(last, state), rows), last)
        )
        return updates

    def run(
        self,
        tokens: Tensor,
        state: State,
        rows: Positions,
        count: int,
        taps: list[Tensor] | None = None,
    ) -> tuple[Tensor, StateUpdates]:
        """Run the first `count` layers on tokens [B, T].

        taps: gets the means [B, T, E] of the streams that enter the layers that a head reads.
        """
        x = self.embed(tokens)[..., None, :].expand(-1, -1, self.config.hc_mult, -1)
        updates = StateUpdates()
        means = dict[int, Tensor]()
        for i in range(count):
            if i in self.taps:
                means[i] = x.mean(2)
            x, new = self.layers[i](x, tokens, self.read_states(i, state), rows)
            updates.written.update(name_states(new, i))
        if taps is not None:
            means[count] = x.mean(2)
            taps += [means[i] for i in self.taps]
        return x, updates

    def read_states(self, layer: int, state: State) -> State:
        """Return a layer's caches under its own names."""
        names = ("kv", COMPRESSED, OPEN) if self.config.ratio(layer) else ("kv",)
        return {name: state[name_layer_state(name, layer)] for name in names}

    def count_bound_rows(self, state: State) -> int:
        layer = next(i for i, ratio in enumerate(self.config.ratios) if ratio)
        return state[name_layer_state(COMPRESSED, layer)].shape[2]

    def logits(self, hidden: Tensor, gather: GatherLogits = all_gather) -> Tensor:
        hidden = hidden[..., : self.config.hc_mult * self.config.hidden_size]
        return self.head(self.norm(self.hc_head(hidden)), self.lm_head, gather)


def name_states(new: State, layer: int) -> State:
    """Return a layer's caches under the engine's names."""
    return {name_layer_state(name, layer): tensor for name, tensor in new.items()}
