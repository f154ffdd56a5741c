"""Decoder layers and MTP modules over any attention, as a step sees them; weights are [in, out].

Shapes: B slots, T tokens, E hidden size, S cache rows, C values of a cache row.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpbuild.builder.models.common.blocks import PackedBlocks
from mtpbuild.builder.models.common.collectives import all_reduce, own_part, rank_constant
from mtpbuild.builder.models.common.precision import parameter
from mtpbuild.builder.models.common.rope import inverse_frequencies, table_scale
from mtpbuild.builder.models.config import ModelConfig, RopeConfig
from mtpbuild.plugins import gated_product, kv_write, rotary_rows
from mtpbuild.plugins.gated_product.op import MAX_TOKENS
from mtpbuild.runtime.ranks import Ranks

State = dict[str, Tensor]  # tensors by name


@dataclass(frozen=True)
class Rows:
    """A pass's tokens have a place: angles, and the cache rows that they see and fill."""

    cos: Tensor  # [B, T, rotary dim / 2]
    sin: Tensor
    base: Tensor  # [B] rows before it are seen by all tokens
    start: Tensor  # [B] fresh rows are written from it on: the base, but for a slot that idles
    positions: Tensor  # [B, T]
    first: Tensor | None = None  # [B] the last fresh row that the first token sees; nothing: 0
    expand: bool = False  # many tokens: attention may make keys and values of all rows at once


class RMSNorm(nn.RMSNorm):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.requires_grad_(False)


class Kernels(nn.Module):
    """A module that computes otherwise on a GPU, if `use_kernels` said so."""

    kernels = False
    fused = False  # also what stands between products is ops that have kernels
    most: int | None = None  # tokens of a pass, where their number varies


def use_kernels(model: nn.Module, most: int | None = None, fused: bool = False) -> None:
    """Let a model compute as a GPU wants it. most: tokens of a pass whose number is a symbol."""
    for module in model.modules():
        if isinstance(module, Kernels):
            module.kernels, module.most, module.fused = True, most, fused


class Rope(Kernels):
    """Angles from positions; computed, not looked up, so no table bounds the sequence."""

    def __init__(self, rope: RopeConfig, dim: int) -> None:
        super().__init__()
        self.scale = table_scale(rope)
        self.register_buffer("inv_freq", inverse_frequencies(rope, dim), persistent=False)
        self.inv_freq: Tensor

    def forward(self, start: Tensor, tokens: int, base: Tensor | None = None) -> Rows:
        """Tokens at positions start .. start + tokens - 1 of each slot; base defaults to start."""
        if self.fused and base is None:
            return self.placed(start, tokens)
        positions = start[:, None] + torch.arange(tokens, device=start.device)
        angles = positions[..., None].float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        return Rows(cos, sin, start if base is None else base, start, positions)

    def placed(
        self,
        start: Tensor,
        tokens: int,
        active: Tensor | None = None,
        end: int = 0,
        offset: int = 0,
    ) -> Rows:
        """The same by one op; tokens are `offset` behind the start, inactive slots at `end`.

        Every layer's kernels read its results. What PyTorch's operators give them instead, the
        compiler would make anew for each kernel.
        """
        operands = (start, active, self.inv_freq, tokens, offset, end, self.scale)
        cos, sin, base, place, first = rotary_rows(*operands)
        positions = place[:, None] + offset + torch.arange(tokens, device=start.device)
        return Rows(cos, sin, base, place, positions, first)


class Attention(Kernels):
    """A decoder layer asks this of its attention."""

    def project(self, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """x [B, T, E] -> query input [B, T, ..], and the tokens' cache rows [B, 1, T, C]."""
        raise NotImplementedError

    def write(self, x: Tensor, rows: Rows, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Do what `project` does, and write these rows into the cache, from rows.start on."""
        q, fresh = self.project(x, rows)
        return q, fresh, kv_write(cache, fresh, rows.start)

    def attend(self, q: Tensor, rows: Rows, cache: Tensor, fresh: Tensor, first: Tensor) -> Tensor:
        """Query input [B, T, ..] -> [B, T, E].

        Query t sees the cache's rows before rows.base [B], and the fresh rows up to first [B] + t,
        which may be written at the base already; with `rows.expand` they are, and first is 0. What
        it returns for a slot that idles is of no use, but finite.
        """
        raise NotImplementedError


class MLP(Kernels):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = parameter(hidden, 2 * inner)
        self.down_proj = parameter(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) @ self.down_proj

    def inner(self, x: Tensor) -> Tensor:
        """x [.., E] -> [.., I]; an op does it for a packed weight, or few tokens."""
        if self.fused and isinstance(self.gate_up_proj, Tensor):
            tokens = math.prod(x.shape[:-1])  # a symbol where slots or a prompt's chunk are open
            if isinstance(tokens, int) and tokens <= MAX_TOKENS:
                return gated_product(x, self.gate_up_proj)
        if isinstance(self.gate_up_proj, PackedBlocks):
            gated = self.gate_up_proj.gated(x)
            if gated is not None:
                return gated
        gate, up = (x @ self.gate_up_proj).chunk(2, dim=-1)
        return F.silu(gate) * up


class DecoderLayer(nn.Module):
    """Pre-norm block: x += attention(norm(x)); x += feed_forward(norm(x)).

    A rank of several computes a part of both terms, and what is added is the ranks' sum; with
    attention-DP it computes both, and `MoE` meets the others.
    """

    def __init__(self, c: ModelConfig, attention: Attention, mlp: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, cache: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """All T tokens attend; their rows are written from rows.start on. x [B, T, E]."""
        q, fresh, cache = self.self_attn.write(self.input_layernorm(x), rows, cache)
        first = torch.zeros_like(rows.base) if rows.first is None else rows.first
        return self.finish(x, q, rows, cache, fresh, first), cache

    def fill(self, x: Tensor, cache: Tensor, rows: Rows) -> Tensor:
        """Write only the cache rows: nobody reads the last layer's output in a prompt."""
        return self.self_attn.write(self.input_layernorm(x), rows, cache)[-1]

    def last(self, x: Tensor, cache: Tensor, rows: Rows, at: Tensor) -> tuple[Tensor, Tensor]:
        """Compute as forward does, but only token at[b] of each slot: [B, 1, E], and the cache."""
        q, fresh, cache = self.self_attn.write(self.input_layernorm(x), rows, cache)
        position = rows.positions.gather(1, at[:, None])
        own = Rows(pick(rows.cos, at), pick(rows.sin, at), rows.base, rows.start, position)
        return self.finish(pick(x, at), pick(q, at), own, cache, fresh, at), cache

    def ahead(
        self, x: Tensor, cache: Tensor, side: Tensor | None, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """One more token that the cache does not keep: its row goes beside those of `side`.

        x [B, 1, E]; side [B, 1, k, C]: the rows of such tokens before it -> [B, 1, E], new side.
        """
        q, row = self.self_attn.project(self.input_layernorm(x), rows)
        side = row if side is None else torch.cat([side, row], dim=2)
        first = rows.first
        if first is None:
            first = torch.full_like(rows.base, side.shape[2] - 1)
        return self.finish(x, q, rows, cache, side, first), side

    def finish(
        self, x: Tensor, q: Tensor, rows: Rows, cache: Tensor, fresh: Tensor, first: Tensor
    ) -> Tensor:
        x = x + self.summed(self.self_attn.attend(q, rows, cache, fresh, first))
        return x + self.summed(self.mlp(self.post_attention_layernorm(x)))

    def summed(self, part: Tensor) -> Tensor:
        return part if self.ranks.parts == 1 else all_reduce(part)


class RecurrentLayer(nn.Module):
    """A layer of the main model whose states have no rows: tokens advance them for good.

    A pass computes the window from the states before it; only when it is known how many of its
    tokens stay are the states advanced, by these tokens alone.
    """

    states: tuple[str, ...]  # their names in the family's `recurrent`

    def forward(self, x: Tensor, state: State, rows: Rows) -> tuple[Tensor, State]:
        """x [B, T, E] and the states before the first token -> x behind the layer, and `tokens`.

        tokens: whatever `advance` needs of each token, under names of the layer's own.
        """
        raise NotImplementedError

    def advance(self, state: State, tokens: State, n: Tensor) -> State:
        """The states behind the first n [B] tokens of the pass; n 0 leaves them to the bit."""
        raise NotImplementedError


@dataclass(frozen=True)
class Passed:
    """What a pass makes of the layers' states."""

    written: State = field(default_factory=dict)  # rows, whose garbage a length hides
    waiting: list[Callable[[Tensor], State]] = field(default_factory=list)

    def behind(self, n: Tensor) -> State:
        """The layers' new states, if the first n [B] tokens of the pass stay."""
        new = dict(self.written)
        for advance in self.waiting:
            new |= advance(n)
        return new


class MTPModule(DecoderLayer):
    """One MTP module: a decoder layer behind what joins a token's embedding and a hidden state.

    Its embedding and head are the trunk's, unless the checkpoint holds some of its own.
    """

    def __init__(self, c: ModelConfig, attention: Attention, mlp: nn.Module, ranks: Ranks) -> None:
        super().__init__(c, attention, mlp, ranks)
        self.rules = c.mtp
        self.enorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hnorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = parameter(2 * c.hidden_size // ranks.parts, c.hidden_size)
        if ranks.parts > 1:
            self.rank = rank_constant()
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(c.hidden_size, c.rms_norm_eps)})
        self.embed_tokens: nn.Parameter | None = None
        self.lm_head: nn.Parameter | None = None

    def join(self, embedding: Tensor, hidden: Tensor, rows: Rows) -> Tensor:
        """Emb(t_{p+k}) and the hidden of slot p, both normed, make the input of slot p."""
        halves = [self.enorm(embedding), self.hnorm(hidden)]
        both = torch.cat(halves[::-1] if self.rules.hidden_first else halves, dim=-1)
        if self.ranks.parts == 1:
            return both @ self.eh_proj
        return all_reduce(own_part(both, self.rank, self.ranks.parts) @ self.eh_proj)

    def hand_on(self, x: Tensor) -> Tensor:
        """What the next module or draft is given of its output, and `read_by_head` of that."""
        return self.norm(x) if self.rules.recycles_normed else x

    def read_by_head(self, hidden: Tensor) -> Tensor:
        return hidden if self.rules.recycles_normed else self.norm(hidden)

    def norm(self, x: Tensor) -> Tensor:
        return self.shared_head["norm"](x)


def pick(x: Tensor, at: Tensor) -> Tensor:
    """x [B, T, ..] -> [B, 1, ..]: row at[b] of each slot."""
    return x.gather(1, at[:, None, None].expand(-1, 1, x.shape[-1]))
