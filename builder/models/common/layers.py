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
from mtpbuild.plugins import gated_product, kv_write, rotary_rows, take_rows
from mtpbuild.plugins.gated_product.op import MAX_TOKENS
from mtpbuild.runtime.ranks import Ranks

State = dict[str, Tensor]  # tensors by name


@dataclass
class Choice:
    """Holds the rows that tokens attend to, where a layer has chosen some: others may take them."""

    rows: Tensor | None = None  # [B, T, k] positions, as `choose_rows` returns them
    stays: bool = False  # layers that choose for themselves take it, too


@dataclass(frozen=True)
class Rows:
    """Holds the place of a pass's tokens: angles, and the cache rows that they see and fill."""

    cos: Tensor  # [B, T, rotary dim / 2]
    sin: Tensor
    base: Tensor  # [B] all tokens see the rows before it
    start: Tensor  # [B] where fresh rows are written: at the base, unless the slot idles
    positions: Tensor  # [B, T]
    first: Tensor | None = None  # [B] the last fresh row that the first token sees; None: row 0
    expand: bool = False  # many tokens: attention may make keys and values of all rows at once
    choice: Choice = field(default_factory=Choice)  # of the layers so far


class RMSNorm(nn.RMSNorm):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.requires_grad_(False)


class Kernels(nn.Module):
    """Is a module that computes with kernels of ours once `use_kernels` has said so."""

    kernels = False
    fused = False  # ops with kernels also do what stands between products
    most: int | None = None  # tokens of a pass, where their number varies
    padded = False  # kernels are plugins, which take fixed sizes alone


def use_kernels(
    model: nn.Module, most: int | None = None, fused: bool = False, padded: bool = False
) -> None:
    """Lets a model compute with kernels.

    most: how many tokens a pass may have whose number is a symbol. fused: ops with kernels also do
    what stands between products. padded: kernels are plugins of TensorRT, which get `most` tokens
    where the number is a symbol.
    """
    for module in model.modules():
        if isinstance(module, Kernels):
            module.kernels, module.most, module.fused = True, most, fused
            module.padded = padded


class Rope(Kernels):
    """Computes angles from positions; no table of them bounds the length of a sequence."""

    def __init__(self, rope: RopeConfig, dim: int) -> None:
        super().__init__()
        self.scale = table_scale(rope)
        self.register_buffer("inv_freq", inverse_frequencies(rope, dim), persistent=False)
        self.inv_freq: Tensor

    def forward(self, start: Tensor, tokens: int, base: Tensor | None = None) -> Rows:
        """Places tokens at positions start [B] .. start + tokens - 1; base [B]: start if None."""
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
        """Does the same by one op; tokens stand `offset` behind start [B], inactive slots at `end`.

        The kernels of all layers read its results; the compiler would compute what PyTorch's
        operators return anew for each kernel.
        """
        operands = (start, active, self.inv_freq, tokens, offset, end, self.scale)
        cos, sin, base, place, first = rotary_rows(*operands)
        positions = place[:, None] + offset + torch.arange(tokens, device=start.device)
        return Rows(cos, sin, base, place, positions, first)


class Attention(Kernels):
    """Defines what a decoder layer asks of its attention."""

    def project(self, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Projects x [B, T, E] to query input [B, T, ..] and to cache rows [B, 1, T, C]."""
        raise NotImplementedError

    def write(self, x: Tensor, rows: Rows, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Does what `project` does, and writes the rows into cache [B, 1, S, C] at rows.start.

        Returns the query input, the fresh rows and the new cache.
        """
        q, fresh = self.project(x, rows)
        return q, fresh, kv_write(cache, fresh, rows.start)

    def attend(self, q: Tensor, rows: Rows, cache: Tensor, fresh: Tensor, first: Tensor) -> Tensor:
        """Attends with query input [B, T, ..]; returns [B, T, E].

        Query t sees the rows of the cache before rows.base [B] and the fresh rows up to first [B] +
        t. The fresh rows may stand in the cache already, at the base; with `rows.expand` they do,
        and first is 0. The result for an idle slot is finite, and nobody uses it.
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
        """Computes silu(gate) * up: x [.., E] -> [.., I].

        An op does it for packed weights, and for few tokens on a GPU.
        """
        if self.fused and isinstance(self.gate_up_proj, Tensor):
            tokens = math.prod(x.shape[:-1])  # a symbol where slots or a prompt's chunk are open
            if isinstance(tokens, int) and tokens <= MAX_TOKENS:
                return gated_product(x, self.gate_up_proj)
        gated = self.by_kernel(x)
        if gated is not None:
            return gated
        gate, up = (x @ self.gate_up_proj).chunk(2, dim=-1)
        return F.silu(gate) * up

    def by_kernel(self, x: Tensor) -> Tensor | None:
        """Do what `inner` does by the CPU's kernels; None if they do not read the weight."""
        weight: object = self.gate_up_proj  # `put` may have replaced the parameter
        return weight.gated(x) if isinstance(weight, PackedBlocks) else None


class DecoderLayer(nn.Module):
    """Is a pre-norm block: x += attention(norm(x)); x += feed_forward(norm(x)).

    One of several ranks computes a part of both terms, and the sum over all ranks is added. With
    attention-DP a rank computes both terms, and only `MoE` involves the others.
    """

    def __init__(self, c: ModelConfig, attention: Attention, mlp: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, cache: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Computes all T tokens and writes their rows: x [B, T, E] -> [B, T, E], and the cache."""
        q, fresh, cache = self.self_attn.write(self.input_layernorm(x), rows, cache)
        first = torch.zeros_like(rows.base) if rows.first is None else rows.first
        return self.finish(x, q, rows, cache, fresh, first), cache

    def fill(self, x: Tensor, cache: Tensor, rows: Rows) -> Tensor:
        """Writes only the cache rows, as nobody reads the last layer's output in a prompt."""
        return self.self_attn.write(self.input_layernorm(x), rows, cache)[-1]

    def last(self, x: Tensor, cache: Tensor, rows: Rows, at: Tensor) -> tuple[Tensor, Tensor]:
        """Computes only token at[b] of each slot, but writes all rows: [B, 1, E], and the cache."""
        q, fresh, cache = self.self_attn.write(self.input_layernorm(x), rows, cache)
        position = rows.positions.gather(1, at[:, None])
        angles = pick(rows.cos, at), pick(rows.sin, at)
        own = Rows(*angles, rows.base, rows.start, position, choice=rows.choice)
        return self.finish(pick(x, at), pick(q, at), own, cache, fresh, at), cache

    def ahead(
        self, x: Tensor, cache: Tensor, side: Tensor | None, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """Computes one more token, x [B, 1, E], whose row the cache does not keep.

        side: the rows [B, 1, k, C] of such tokens before it. Returns [B, 1, E] and the new side, to
        which the token's row is added.
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
        return over_ranks(part, self.ranks)


def over_ranks(part: Tensor, ranks: Ranks) -> Tensor:
    """Sums what each rank has computed a part of."""
    return part if ranks.parts == 1 else all_reduce(part)


class RecurrentLayer(nn.Module):
    """Is a layer of the main model whose states have no rows, so that no token can be taken back.

    A pass computes the window from the states before it. The states are advanced when it is known
    how many of the window's tokens stay, and by these tokens alone.
    """

    states: tuple[str, ...]  # their names in the family's `recurrent`

    def forward(self, x: Tensor, state: State, rows: Rows) -> tuple[Tensor, State]:
        """Computes x [B, T, E] from the states before the first token.

        Returns the layer's output [B, T, E], and what `advance` needs of each token, under names of
        the layer's own.
        """
        raise NotImplementedError

    def advance(self, state: State, tokens: State, n: Tensor) -> State:
        """Returns the states after the first n [B] tokens; n 0 leaves them the same to the bit."""
        raise NotImplementedError

    def advance_all(self, state: State, tokens: State, n: Tensor) -> State:
        """Returns the states after n [B] tokens that are known to be all of the pass."""
        return self.advance(state, tokens, n)


@dataclass(frozen=True)
class Passed:
    """Holds what a pass makes of the layers' states."""

    written: State = field(default_factory=dict)  # rows, whose garbage a length hides
    waiting: list[Callable[[Tensor, bool], State]] = field(default_factory=list)

    def behind(self, n: Tensor, all_stay: bool = False) -> State:
        """Returns the layers' new states if the first n [B] tokens of the pass stay.

        all_stay: n is known to be all tokens.
        """
        new = dict(self.written)
        for advance in self.waiting:
            new |= advance(n, all_stay)
        return new


class MTPModule(DecoderLayer):
    """Is an MTP module: it joins a token's embedding and a hidden state for a decoder layer.

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
        """Joins Emb(t_{p+k}) and the hidden state of slot p, both normed; all are [B, T, E]."""
        halves = [self.enorm(embedding), self.hnorm(hidden)]
        both = torch.cat(halves[::-1] if self.rules.hidden_first else halves, dim=-1)
        if self.ranks.parts == 1:
            return both @ self.eh_proj
        return all_reduce(own_part(both, self.rank, self.ranks.parts) @ self.eh_proj)

    def hand_on(self, x: Tensor) -> Tensor:
        """Returns what the next module, the next draft and `read_by_head` get of its output x."""
        return self.norm(x) if self.rules.recycles_normed else x

    def read_by_head(self, hidden: Tensor) -> Tensor:
        return hidden if self.rules.recycles_normed else self.norm(hidden)

    def norm(self, x: Tensor) -> Tensor:
        return self.shared_head["norm"](x)


def pick(x: Tensor, at: Tensor) -> Tensor:
    """Picks row at[b] of each slot: x [B, T, E] -> [B, 1, E]."""
    return take_rows(x, at, 1)
