"""Decoder layers and MTP modules of the step program, over any attention; weights are [in, out].

Shapes: B slots, T tokens, E hidden size, S cache rows, C values of a cache row.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from mtpbuild.builder.checkpoint.config import ModelConfig, RopeConfig
from mtpbuild.builder.models.common.blocks import multiply_gated
from mtpbuild.builder.models.common.collectives import all_reduce, make_rank_constant, take_own_part
from mtpbuild.builder.models.common.precision import parameter
from mtpbuild.builder.models.common.rope import compute_inverse_frequencies, compute_table_scale
from mtpbuild.plugins import kv_write, rotary_rows, take_rows
from mtpbuild.runtime.ranks import Ranks

State = dict[str, Tensor]  # tensors by name


@dataclass
class Choice:
    """The rows that an indexer chose for each token, if one did; later layers may reuse them."""

    rows: Tensor | None = None  # [B, T, k] positions, as `choose_rows` returns them
    stays: bool = False  # whether layers with an indexer reuse the choice, too


@dataclass(frozen=True)
class Positions:
    """The positions of a pass's tokens: angles, and the cache rows that they see and write."""

    cos: Tensor  # [B, T, rotary dim / 2]
    sin: Tensor
    base: Tensor  # [B] all tokens see the cached rows before it
    start: Tensor  # [B] first row to write: the base, or the end of the cache in an idle slot
    positions: Tensor  # [B, T]
    first: Tensor  # [B] the last fresh row that the first token sees
    expand: bool = False  # many tokens: attention may compute keys and values of all rows at once
    choice: Choice = field(default_factory=Choice)  # of the layers so far


class RMSNorm(nn.RMSNorm):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.requires_grad_(False)


class Rope(nn.Module):
    """Rotary angles from positions; no table of them limits the length of a sequence."""

    def __init__(self, rope: RopeConfig, dim: int) -> None:
        super().__init__()
        self.scale = compute_table_scale(rope)
        self.register_buffer("inv_freq", compute_inverse_frequencies(rope, dim), persistent=False)
        self.inv_freq: Tensor

    def forward(
        self,
        start: Tensor,
        tokens: int,
        active: Tensor | None = None,
        end: int = 0,
        offset: int = 0,
    ) -> Positions:
        """Place `tokens` tokens of each slot from start [B] + offset on, inactive slots at `end`.

        One op computes the angles for the kernels of all layers. From PyTorch's operators the
        compiler would compute them again in each kernel.
        """
        cos, sin, base, place, first = rotary_rows(
            start, active, self.inv_freq, tokens=tokens, offset=offset, end=end, scale=self.scale
        )
        positions = place[:, None] + offset + torch.arange(tokens, device=start.device)
        return Positions(cos, sin, base, place, positions, first)


class Attention(nn.Module):
    """The attention of a decoder layer."""

    def project(self, x: Tensor, rows: Positions) -> tuple[Tensor, Tensor]:
        """Project x [B, T, E] to query input [B, T, ..] and to cache rows [B, 1, T, C]."""
        raise NotImplementedError

    def write(self, x: Tensor, rows: Positions, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x, and write its rows into cache [B, 1, S, C] at rows.start.

        Returns the query input, the fresh rows and the new cache.
        """
        q, fresh = self.project(x, rows)
        return q, fresh, kv_write(cache, fresh, rows.start)

    def attend(
        self, q: Tensor, rows: Positions, cache: Tensor, fresh: Tensor, first: Tensor
    ) -> Tensor:
        """Attend with query input [B, T, ..]; return [B, T, E].

        Query t sees the rows of the cache before rows.base [B] and the fresh rows up to first [B] +
        t. The fresh rows may already be in the cache, at the base; with `rows.expand` they are, and
        first is 0. The result for an idle slot is finite and unused.
        """
        raise NotImplementedError


class MLP(nn.Module):
    """A feed-forward of two products, whose first one is gated."""

    by_kernel_of_few = ("gate_up_proj",)

    def __init__(self, hidden: int, inner: int, gelu: bool = False, limit: float = 0.0) -> None:
        super().__init__()
        self.gelu, self.limit = gelu, limit
        self.gate_up_proj = parameter(hidden, 2 * inner)
        self.down_proj = parameter(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) @ self.down_proj

    def inner(self, x: Tensor) -> Tensor:
        """Compute silu(gate) * up, or gelu(gate) * up: x [.., E] -> [.., I]."""
        return multiply_gated(x, self.gate_up_proj, self.gelu, self.limit)


class DecoderLayer(nn.Module):
    """A pre-norm block: x += attention(norm(x)); x += feed_forward(norm(x)).

    With several ranks, each computes a part of each term, and the parts' sum is added. With
    attention-DP a rank computes both terms alone, and only `MoE` communicates.
    """

    def __init__(self, c: ModelConfig, attention: Attention, mlp: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, cache: Tensor, rows: Positions) -> tuple[Tensor, Tensor]:
        """Compute all T tokens and write their rows: x [B, T, E] -> [B, T, E], and the cache."""
        q, fresh, cache = self.self_attn.write(self.input_layernorm(x), rows, cache)
        return self.finish(x, q, rows, cache, fresh, rows.first), cache

    def fill(self, x: Tensor, cache: Tensor, rows: Positions) -> Tensor:
        """Write only the cache rows: in a prompt nothing reads the last layer's output."""
        return self.self_attn.write(self.input_layernorm(x), rows, cache)[-1]

    def forward_last(
        self, x: Tensor, cache: Tensor, rows: Positions, at: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute only token at[b] of each slot, but write all rows: [B, 1, E], and the cache."""
        q, fresh, cache = self.self_attn.write(self.input_layernorm(x), rows, cache)
        position = rows.positions.gather(1, at[:, None])
        cos, sin, x, q = (take_rows(part, at, 1) for part in (rows.cos, rows.sin, x, q))
        last = replace(rows, cos=cos, sin=sin, positions=position, first=at)
        return self.finish(x, q, last, cache, fresh, at), cache

    def forward_uncached(
        self, x: Tensor, cache: Tensor, side: Tensor | None, rows: Positions
    ) -> tuple[Tensor, Tensor]:
        """Compute one more token, x [B, 1, E], whose row the cache does not keep.

        side: the rows [B, 1, k, C] of the uncached tokens before it. Returns [B, 1, E] and `side`
        with the token's row appended.
        """
        q, row = self.self_attn.project(self.input_layernorm(x), rows)
        side = row if side is None else torch.cat([side, row], dim=2)
        return self.finish(x, q, rows, cache, side, rows.first), side

    def finish(
        self, x: Tensor, q: Tensor, rows: Positions, cache: Tensor, fresh: Tensor, first: Tensor
    ) -> Tensor:
        x = x + self.summed(self.self_attn.attend(q, rows, cache, fresh, first))
        return x + self.summed(self.mlp(self.post_attention_layernorm(x)))

    def summed(self, part: Tensor) -> Tensor:
        return sum_over_ranks(part, self.ranks)


def sum_over_ranks(part: Tensor, ranks: Ranks) -> Tensor:
    """Sum the parts that the ranks have computed."""
    return part if ranks.parts == 1 else all_reduce(part)


class RecurrentLayer(nn.Module):
    """A layer of the main model whose states have no rows, so that no token can be taken back.

    A pass computes the window from the states before it. The states are advanced after acceptance,
    by the tokens that are kept.
    """

    states: tuple[str, ...]  # their names in the family's `recurrent`

    def forward(self, x: Tensor, state: State, rows: Positions) -> tuple[Tensor, State]:
        """Compute x [B, T, E] from the states before the first token.

        Returns the layer's output [B, T, E], and the tensors that `advance` needs, under keys that
        the layer chooses.
        """
        raise NotImplementedError

    def advance(self, state: State, tokens: State, n: Tensor) -> State:
        """Return the states after the first n [B] tokens; with n = 0 they stay bit-identical."""
        raise NotImplementedError

    def advance_all(self, state: State, tokens: State, n: Tensor) -> State:
        """Return the states after n [B] tokens that are known to be all of the pass."""
        return self.advance(state, tokens, n)


@dataclass(frozen=True)
class StateUpdates:
    """The changes that a pass makes to the layers' states."""

    # Cache rows; rows beyond a request's length are ignored.
    written: State = field(default_factory=dict)
    deferred: list[Callable[[Tensor, bool], State]] = field(default_factory=list)

    def after(self, n: Tensor, all_stay: bool = False) -> State:
        """Return the layers' new states if the first n [B] tokens of the pass are kept.

        all_stay: n is known to be all tokens.
        """
        new = dict(self.written)
        for advance in self.deferred:
            new |= advance(n, all_stay)
        return new


class DraftLayer(DecoderLayer):
    """A decoder layer over a token's embedding joined with a hidden state.

    Its embedding and head are the trunk's, unless the checkpoint has other ones for it.
    """

    embed_tokens: nn.Parameter | None
    lm_head: nn.Parameter | None

    def combine_inputs(self, embedding: Tensor, hidden: Tensor, rows: Positions) -> Tensor:
        """Join Emb(t_{p+k}) [B, T, E] and the hidden state of slot p to the layer's input."""
        raise NotImplementedError

    def compute_next_hidden(self, x: Tensor) -> Tensor:
        """Return what the next module or draft and `compute_head_input` read, from output x."""
        raise NotImplementedError

    def compute_head_input(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class MTPModule(DraftLayer):
    """An MTP module: its input is a projection of both, normed."""

    def __init__(self, c: ModelConfig, attention: Attention, mlp: nn.Module, ranks: Ranks) -> None:
        super().__init__(c, attention, mlp, ranks)
        self.rules = c.mtp
        self.enorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hnorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = parameter(2 * c.hidden_size // ranks.parts, c.hidden_size)
        if ranks.parts > 1:
            self.rank = make_rank_constant()
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(c.hidden_size, c.rms_norm_eps)})
        self.embed_tokens = None
        self.lm_head = None

    def combine_inputs(self, embedding: Tensor, hidden: Tensor, rows: Positions) -> Tensor:
        halves = [self.enorm(embedding), self.hnorm(hidden)]
        both = torch.cat(halves[::-1] if self.rules.hidden_first else halves, dim=-1)
        if self.ranks.parts == 1:
            return both @ self.eh_proj
        return all_reduce(take_own_part(both, self.rank, self.ranks.parts) @ self.eh_proj)

    def compute_next_hidden(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.rules.recycles_normed else x

    def compute_head_input(self, hidden: Tensor) -> Tensor:
        return hidden if self.rules.recycles_normed else self.norm(hidden)

    def norm(self, x: Tensor) -> Tensor:
        return self.shared_head["norm"](x)
