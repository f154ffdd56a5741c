"""DeepSeek-V4's trunk and MTP module in the step program.

Shapes: B slots, T tokens, E hidden size, N residual streams, H heads, D width of a head (and of a
row, which is key and value), G groups of heads, r tokens of a compressed row.
"""

from dataclasses import dataclass, field, fields, replace
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
    Rope,
    State,
    StateUpdates,
)
from mtpbuild.builder.models.common.precision import cast, parameter
from mtpbuild.builder.models.deepseek_v4.config import DeepseekV4Config
from mtpbuild.plugins import kv_write, rotary_rows, take_rows
from mtpbuild.plugins.grouped_rows.op import write_ring
from mtpbuild.runtime.contract.state import name_layer_state
from mtpbuild.runtime.ranks import ALONE, Ranks

Angles = tuple[Tensor, Tensor]  # cos and sin [B, .., R / 2]
COMPRESSED, OPEN = "compressed", "open"


@dataclass(frozen=True)
class StreamPositions(Positions):
    """Positions with the angles of layers that compress, and of their rows."""

    far: Angles = field(kw_only=True)  # of the tokens, in these layers
    rows: dict[int, Angles] = field(kw_only=True)  # of compressed rows, by r
    ring: Tensor = field(kw_only=True)  # [B] start, or -1 in an idle slot


class StreamRope(Rope):
    """The angles of both kinds of layers."""

    def __init__(self, c: DeepseekV4Config) -> None:
        super().__init__(c.rope, c.qk_rope_head_dim)
        self.far = Rope(c.row_rope, c.qk_rope_head_dim)
        self.ratios = sorted({*c.ratios} - {0})

    def forward(
        self,
        start: Tensor,
        tokens: int,
        active: Tensor | None = None,
        end: int = 0,
        offset: int = 0,
    ) -> StreamPositions:
        """Place tokens as `Rope` does; a compressed row has the position of its first token."""
        near = super().forward(start, tokens, active, end, offset)
        far = self.far(start, tokens, active, end, offset)
        rows = {}
        for r in self.ratios:  # powers of two, by which a frequency is multiplied exactly
            cos, sin, *_ = rotary_rows(
                near.start // r,
                None,
                self.far.inv_freq * r,
                tokens=count_made(tokens, r),
                offset=0,
                end=0,
                scale=self.far.scale,
            )
            rows[r] = cos, sin
        ring = near.start if active is None else torch.where(active, start, -1)
        parts = {part.name: getattr(near, part.name) for part in fields(near)}
        return StreamPositions(**parts, far=(far.cos, far.sin), rows=rows, ring=ring)


def count_made(tokens: int, r: int) -> int:
    """Return how many compressed rows a pass makes: all that it may complete, and others.

    At least two, as torch.export takes a size that may be 1 for one that is.
    """
    return tokens // r + 2


def rotate_end(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last R numbers of x [B, T, .., D] in neighbouring pairs.

    cos, sin: [B, T, R / 2].
    """
    size = 2 * cos.shape[-1]
    for _ in x.shape[3:]:
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    rest, turned = x[..., : x.shape[-1] - size], x[..., x.shape[-1] - size :]
    a, b = turned[..., 0::2], turned[..., 1::2]
    both = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([rest, both], dim=-1)


def read_ring(cache: Tensor, at: Tensor) -> Tensor:
    """Return the rows [B, .., C] of positions at [B, ..] in a ring [B, 1, S, C].

    Position p is in row p % S; of those before 0 any row is returned.
    """
    return read_rows(cache, at.clamp(min=0) % cache.shape[2])


def read_rows(cache: Tensor, at: Tensor) -> Tensor:
    """Return the rows [B, .., C] with the numbers at [B, ..] in a cache [B, 1, S, C]."""
    slots = torch.arange(at.shape[0], device=at.device).reshape(-1, *(1 for _ in at.shape[1:]))
    return cache[:, 0][slots, at]


def norm_plainly(x: Tensor, eps: float) -> Tensor:
    """Compute an RMSNorm over the last axis, without a weight."""
    size = x.shape[-1:]
    return F.rms_norm(x, size, x.new_ones(size), eps)


class Mixer(nn.Module):
    """The weights by which the streams enter a branch, and by which its result joins them."""

    def __init__(self, c: DeepseekV4Config) -> None:
        super().__init__()
        N = c.hc_mult
        self.streams, self.iterations, self.eps = N, c.hc_sinkhorn_iters, c.hc_eps
        self.norm_eps = c.rms_norm_eps
        self.fn = parameter(N * c.hidden_size, N * (N + 2))
        self.base, self.scale = parameter(N * (N + 2)), parameter(3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the branch's input [B, T, E] of x [B, T, N, E], and what `join_branch` takes."""
        N, eps = self.streams, self.eps
        flat = x.flatten(2)
        weights = norm_plainly(flat, self.norm_eps) @ self.fn
        factors = torch.cat([self.scale[i].expand(n) for i, n in enumerate((N, N, N * N))])
        pre, post, comb = (weights * factors + self.base).split([N, N, N * N], dim=-1)
        comb = comb.unflatten(-1, (N, N)).softmax(-1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(self.iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return ((pre.sigmoid() + eps)[..., None] * x).sum(2), 2 * post.sigmoid(), comb


def join_branch(x: Tensor, branch: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Mix the streams x [B, T, N, E], and add a branch's result [B, T, E] to each."""
    return post[..., None] * branch[..., None, :] + comb.mT @ x


class StreamHead(nn.Module):
    """The sum of the streams that norm and head read."""

    def __init__(self, c: DeepseekV4Config) -> None:
        super().__init__()
        N = c.hc_mult
        self.eps, self.norm_eps, self.streams = c.hc_eps, c.rms_norm_eps, N
        self.fn = parameter(N * c.hidden_size, N)
        self.base, self.scale = parameter(N), parameter(1)

    def forward(self, x: Tensor) -> Tensor:
        """Sum the streams x [B, T, N E] to [B, T, E]."""
        weights = norm_plainly(x, self.norm_eps) @ self.fn
        pre = (weights * self.scale + self.base).sigmoid() + self.eps
        return (pre[..., None] * x.unflatten(-1, (self.streams, -1))).sum(2)


class Compressor(nn.Module):
    """The making of compressed rows from the projections of the tokens around them.

    A layer that chooses rows makes each of two windows of r tokens, the later one the row's own.
    Its rows have an indexer's keys after the values.
    """

    def __init__(self, c: DeepseekV4Config, layer: int) -> None:
        super().__init__()
        self.ratio, self.group = c.ratio(layer), c.group(layer)
        self.windows = 1 + c.chooses(layer)
        self.widths = [c.head_dim] + c.chooses(layer) * [c.index_head_dim]
        self.proj = parameter(c.hidden_size, c.open_width(layer))
        self.position_bias = parameter(self.ratio, self.windows * sum(self.widths))
        self.norms = nn.ModuleList(RMSNorm(width, c.rms_norm_eps) for width in self.widths)

    def place_rows(self, rows: StreamPositions, tokens: int, bound: int) -> Tensor:
        """Return the numbers [B, n] of the rows to make from the base's on.

        The last one within `bound` cache rows takes the place of later ones.
        """
        numbers = torch.arange(count_made(tokens, self.ratio), device=rows.start.device)
        numbers = (rows.start // self.ratio)[:, None] + numbers
        return numbers - (numbers - (bound // self.ratio - 1)).clamp(min=0)

    def make_rows(self, opened: Tensor, numbers: Tensor, rows: StreamPositions) -> Tensor:
        """Return the rows [B, n, D + ..] of these numbers, of the projections in the ring.

        Those that are not complete are any numbers: nobody sees them.
        """
        r, W = self.ratio, self.windows
        token = torch.arange(r, device=numbers.device)
        windows = list[tuple[Tensor, Tensor]]()
        for w in range(W):
            taken = read_ring(opened, (numbers + (w + 1 - W))[..., None] * r + token)
            value, gate = taken.chunk(2, dim=-1)
            windows.append((value, gate + self.position_bias))
        ahead = (numbers - (rows.start // r)[:, None])[..., None]
        cos, sin = (part.gather(1, ahead.expand(-1, -1, part.shape[2])) for part in rows.rows[r])
        parts, at = list[Tensor](), 0
        for width, norm in zip(self.widths, self.norms, strict=True):
            value, gate = (
                torch.cat(
                    [both[i][..., at + w * width :][..., :width] for w, both in enumerate(windows)],
                    dim=2,
                )
                for i in range(2)
            )
            at += W * width
            if W > 1:  # before the first token there is no window
                there = (numbers > 0)[..., None, None] | (torch.arange(W * r) >= r)[:, None]
                gate = torch.where(there, gate, float("-inf"))
            parts.append(rotate_end(norm((value * gate.softmax(2)).sum(2)), cos, sin))
        return torch.cat(parts, dim=-1)

    def write(self, cache: Tensor, made: Tensor, numbers: Tensor, rows: StreamPositions) -> Tensor:
        """Write rows [B, n, D + ..] to the places of their last tokens in a cache [B, 1, S, C]."""
        r, g, (B, _, _, width) = self.ratio, self.group, cache.shape
        made = F.pad(made, (0, g * width - made.shape[2])).unflatten(2, (g, width))
        at = numbers[..., None] * r + torch.arange(r - g, r, device=cache.device)
        slots = torch.arange(B, device=cache.device)[:, None, None]
        idle = (rows.ring < 0)[:, None, None, None]
        new = torch.where(idle, cache[:, 0][slots, at], cast(made, cache.dtype))
        return cache.index_put((slots, torch.zeros_like(at), at), new)

    def read(self, cache: Tensor) -> list[Tensor]:
        """Return the rows [B, n, D] of a cache, and with an indexer its keys."""
        r, g = self.ratio, self.group
        count = cache.shape[2] // r
        at = torch.arange(count, device=cache.device)[:, None] * r + torch.arange(r - g, r)
        rows = cache[:, 0].index_select(1, at.flatten()).reshape(-1, count, g * cache.shape[3])
        return [*rows[..., : sum(self.widths)].split(self.widths, dim=-1)]


class RowIndexer(nn.Module):
    """The choice of compressed rows."""

    def __init__(self, c: DeepseekV4Config) -> None:
        super().__init__()
        self.heads, self.count = c.index_n_heads, c.index_topk
        self.q_b_proj = parameter(c.q_lora_rank, c.index_n_heads * c.index_head_dim)
        self.weights_proj = parameter(c.hidden_size, c.index_n_heads)

    def choose(
        self, x: Tensor, latent: Tensor, keys: Tensor, seen: Tensor, angles: Angles
    ) -> Tensor:
        """Return which of the rows that are seen [B, T, n] are chosen; keys [B, n, D]."""
        q = rotate_end((latent @ self.q_b_proj).unflatten(-1, (self.heads, -1)), *angles)
        size = q.shape[-1]
        raw = (q.flatten(1, 2) @ keys.mT).unflatten(1, (x.shape[1], self.heads))
        weights = (x @ self.weights_proj) * self.heads**-0.5
        scores = (weights[..., None] * raw.relu() * size**-0.5).sum(2)
        scores = F.pad(
            scores.masked_fill(~seen, float("-inf")), (0, self.count), value=float("-inf")
        )
        best = scores.topk(self.count, dim=-1).indices
        none = torch.zeros_like(scores, dtype=torch.bool)
        return none.scatter(-1, best, True)[..., : seen.shape[-1]] & seen


class StreamAttention(nn.Module):
    """Attention to a window of rows and to compressed rows, with a sink for each head."""

    def __init__(self, c: DeepseekV4Config, layer: int) -> None:
        super().__init__()
        E, H, D = c.hidden_size, c.num_attention_heads, c.head_dim
        self.config, self.ratio = c, c.ratio(layer)
        self.qkv_a_proj = parameter(E, c.q_lora_rank + D)
        self.q_a_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = parameter(c.q_lora_rank, H * D)
        self.kv_norm = RMSNorm(D, c.rms_norm_eps)
        self.sinks = parameter(H)
        self.compressor = Compressor(c, layer) if self.ratio else None
        self.indexer = RowIndexer(c) if c.chooses(layer) else None
        for g in range(c.o_groups):
            self.register_parameter(f"o_a_{g}", parameter(H * D // c.o_groups, c.o_lora_rank))
        self.o_b_proj = parameter(c.o_groups * c.o_lora_rank, E)

    def angles(self, rows: StreamPositions) -> Angles:
        return rows.far if self.ratio else (rows.cos, rows.sin)

    def project(self, x: Tensor, rows: StreamPositions) -> tuple[Tensor, Tensor]:
        """Return the queries' latent and the fresh rows [B, T, D] of x [B, T, E]."""
        c = self.config
        latent, row = (x @ self.qkv_a_proj).split([c.q_lora_rank, c.head_dim], dim=-1)
        return self.q_a_norm(latent), rotate_end(self.kv_norm(row), *self.angles(rows))

    def compress(self, x: Tensor, old: State, rows: StreamPositions) -> State:
        """Return the caches of compressed rows and of projections after x [B, T, E]."""
        if self.compressor is None:
            return {}
        projected = cast(x @ self.compressor.proj, old[OPEN].dtype)
        opened = write_ring(old[OPEN], projected[:, None], rows.ring)
        numbers = self.compressor.place_rows(rows, x.shape[1], old[COMPRESSED].shape[2])
        made = self.compressor.make_rows(opened, numbers, rows)
        compressed = self.compressor.write(old[COMPRESSED], made, numbers, rows)
        return {COMPRESSED: compressed, OPEN: opened}

    def attend(
        self,
        x: Tensor,
        latent: Tensor,
        rows: StreamPositions,
        near: Tensor,
        first: Tensor,
        compressed: Tensor | None,
    ) -> Tensor:
        """Attend from x and the queries' latent [B, T, ..]; return [B, T, E].

        near [B, W - 1 + F, D]: the rows from position base - (W - 1) on. compressed: the cache of
        compressed rows. Query t has position base + first [B] + t.
        """
        c = self.config
        H, D, W = c.num_attention_heads, c.head_dim, c.sliding_window
        angles = self.angles(rows)
        q = (latent @ self.q_b_proj).unflatten(-1, (H, D))
        q = rotate_end(norm_plainly(q, c.rms_norm_eps), *angles).transpose(1, 2)
        later = first[:, None] + torch.arange(q.shape[2], device=first.device)  # [B, T]
        at = torch.arange(near.shape[1], device=first.device) - (W - 1)
        ahead = later[..., None] - at  # [B, T, rows]
        seen = (ahead >= 0) & (ahead < W) & (rows.base[:, None, None] + at >= 0)
        keys = near
        if self.compressor is not None and compressed is not None:
            entries, *index = self.compressor.read(compressed)
            complete = (rows.base[:, None] + later + 1) // self.ratio
            chosen = torch.arange(entries.shape[1], device=first.device) < complete[..., None]
            if self.indexer is not None:
                chosen = self.indexer.choose(x, latent, index[0], chosen, angles)
            keys, seen = torch.cat([near, entries], dim=1), torch.cat([seen, chosen], dim=-1)
        scores = (q @ keys[:, None].mT) * D**-0.5
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        sinks = self.sinks[:, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        o = (weights @ keys[:, None]).transpose(1, 2)  # [B, T, H, D]
        cos, sin = angles
        groups = rotate_end(o, cos, -sin).unflatten(2, (c.o_groups, -1)).flatten(3).unbind(2)
        parts = [part @ getattr(self, f"o_a_{g}") for g, part in enumerate(groups)]
        return torch.cat(parts, dim=-1) @ self.o_b_proj


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
        x, updates = self.run(tokens, state, rows, len(self.layers))
        return x.flatten(2), updates

    def fill(self, tokens: Tensor, state: State, rows: Positions) -> StateUpdates:
        last = len(self.layers) - 1
        x, updates = self.run(tokens, state, rows, last)
        layer: Any = self.layers[last]
        updates.written.update(
            name_states(layer.fill(x, self.read_states(last, state), rows), last)
        )
        return updates

    def run(
        self, tokens: Tensor, state: State, rows: Positions, count: int
    ) -> tuple[Tensor, StateUpdates]:
        """Run the first `count` layers on tokens [B, T]."""
        x = self.embed(tokens)[..., None, :].expand(-1, -1, self.config.hc_mult, -1)
        updates = StateUpdates()
        for i in range(count):
            x, new = self.layers[i](x, tokens, self.read_states(i, state), rows)
            updates.written.update(name_states(new, i))
        return x, updates

    def read_states(self, layer: int, state: State) -> State:
        """Return a layer's caches under its own names."""
        names = ("kv", COMPRESSED, OPEN) if self.config.ratio(layer) else ("kv",)
        return {name: state[name_layer_state(name, layer)] for name in names}

    def count_bound_rows(self, state: State) -> int:
        layer = next(i for i, ratio in enumerate(self.config.ratios) if ratio)
        return state[name_layer_state(COMPRESSED, layer)].shape[2]

    def logits(self, hidden: Tensor, gather: GatherLogits = all_gather) -> Tensor:
        return self.head(self.norm(self.hc_head(hidden)), self.lm_head, gather)


def name_states(new: State, layer: int) -> State:
    """Return a layer's caches under the engine's names."""
    return {name_layer_state(name, layer): tensor for name, tensor in new.items()}
