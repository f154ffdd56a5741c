"""How the engine's weights are made of what is stored: the rows of the families' tables.

What is stored is cut to the share of a rank, then joined, permuted or stacked. Here is also what
the tables of all families have in common: vectors, products, MLPs, embedding and head.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from math import gcd
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtpbuild.builder.models.common.copies import EMBEDDING, HEAD
from mtpbuild.builder.models.config import ModelConfig
from mtpbuild.builder.weights.formats import FP8_BLOCK, GROUP, Format, Integers, Nvfp4, spread
from mtpbuild.runtime.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from mtpbuild.builder.weights.stored import Checkpoint

Transform = Callable[..., Tensor]
PARTS = ("values", "scales", "scales_2")  # what an engine calls a format's parts, in their order


def stack_rows(*w: Tensor) -> Tensor:
    """Projections of one input become one product: [out_i, ..] each -> [sum of out_i, ..]."""
    return torch.cat(w) if len(w) > 1 else w[0]


@dataclass(frozen=True)
class Stored:
    """A weight as the checkpoint stores it, with the shape that the configuration demands."""

    name: str
    shape: tuple[int, ...]
    axis: int | None = None  # that ranks split; None: each holds all of it
    routed: bool = False  # a routed expert's: groups of ranks hold it, split by their columns


@dataclass(frozen=True)
class Share:
    """The part of a model that one of several ranks holds.

    The rank's number matters to weights alone: all ranks have the same graph.
    """

    ranks: Ranks = ALONE
    rank: int = 0

    def experts(self, count: int) -> range:
        """Ids of the routed experts that it holds of `count`, whole or a part of each.

        Groups are in the order of TensorRT-LLM: neighbours are in different ones.
        """
        size, group = count // self.ranks.ep, self.rank % self.ranks.ep
        return range(group * size, (group + 1) * size)

    def cut(self, stored: Stored, tensor: Tensor) -> Tensor:
        """This rank's part of a checkpoint's tensor, which must be among those that it holds."""
        parts, part = self.ranks.parts, self.rank
        if stored.routed:
            parts, part = self.ranks.tp // self.ranks.ep, self.rank // self.ranks.ep
        if stored.axis is None or parts == 1:
            return tensor
        size = tensor.shape[stored.axis] // parts
        return tensor.narrow(stored.axis, part * size, size)

    def shape(self, stored: Stored) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return self.cut(stored, torch.empty(stored.shape, device="meta")).shape


WHOLE = Share()


@dataclass(frozen=True)
class Weight:
    """A weight of the engine, named as in the program's state_dict, and how it is made."""

    name: str
    stored: tuple[Stored, ...]
    transform: Transform = stack_rows  # of what is stored of one slice
    rows: Transform | None = None  # of a product: as transform, but [out, ..], also for blocks
    slices: int = 1  # of what is stacked along a first axis
    joined: int | None = None  # of products: the axis along which what is stored is joined
    looked_up: bool = False  # its rows are chosen by tokens
    per_head: bool = False  # a stack of products [H, in, out]
    format: Format | None = None  # in which the engine holds it; None: as floats

    @property
    def groups(self) -> Iterator[tuple[Stored, ...]]:
        """What is stored of each slice; their transform makes rows of the weight."""
        size = len(self.stored) // self.slices
        return (self.stored[i : i + size] for i in range(0, len(self.stored), size))

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """The shape of one slice, as floats and of all ranks."""
        stored = (torch.empty(each.shape, device="meta") for each in next(self.groups))
        return self.transform(*stored).shape

    @property
    def tensors(self) -> dict[str, str]:
        """Name of each of its tensors in the engine -> suffix of the part that this one holds."""
        if self.format is None:
            return {self.name: ""}
        names = (
            [f"{self.name}.{h}" for h in range(self.slice_shape[0])]
            if self.per_head
            else [self.name]
        )
        parts = [*zip(PARTS, self.format.suffixes, strict=False)]
        return {f"{name}.{part}": suffix for name in names for part, suffix in parts}

    def scale_group(self, share: Share) -> int:
        """Inputs that share a scale; what does not end with a block cuts all of them in pieces."""
        widths = (share.shape(stored)[1] for stored in self.stored)
        return gcd(GROUP if isinstance(self.format, Nvfp4) else FP8_BLOCK, *widths)

    def made(self, checkpoint: "Checkpoint", share: Share) -> Iterator[tuple[str, Tensor]]:
        """Yield its tensors, or the rows of them that each slice is, contiguous."""
        for group in self.groups:
            if self.format is not None and not self.per_head:
                parts = [checkpoint.parts(stored.name) for stored in group]
                for name, suffix in self.tensors.items():
                    found = [each[suffix] for each in parts]
                    yield name, self._joined(suffix, group, found, share).contiguous()
                continue
            floats = [share.cut(stored, checkpoint.read(stored.name)) for stored in group]
            if self.format is None:
                yield self.name, self.transform(*floats).contiguous()
            else:
                yield from self._by_head(self.format, self.transform(*floats))

    def _by_head(self, format: Format, heads: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Encode a product for each head: its inputs are no columns of what a checkpoint stores.

        heads: fp32 [H, in, out].
        """
        encoded = (format.encode(head.T.contiguous()) for head in heads)
        parts = chain.from_iterable(each.values() for each in encoded)
        return zip(self.tensors, parts, strict=True)

    def _joined(
        self, suffix: str, group: tuple[Stored, ...], parts: list[Tensor], share: Share
    ) -> Tensor:
        """One tensor of the engine, or a slice of it, of one part of each stored weight."""
        if isinstance(self.format, Integers):
            if self.rows is not None:
                return self.rows(*parts)
            return torch.stack(parts, dim=1).reshape(1, -1, parts[0][0].numel())  # outputs in turn
        rows = (self._rows(suffix, *each, share) for each in zip(group, parts, strict=True))
        return self.transform(*rows)

    def _rows(self, suffix: str, stored: Stored, part: Tensor, share: Share) -> Tensor:
        """A part as [out, ..], so that outputs can be permuted and joined as the weight's are."""
        if suffix == "_scale_2":
            outputs, inputs = share.shape(stored)
            return part.expand((1, inputs // GROUP) if self.joined == 1 else (outputs, 1))
        if suffix == "_scale_inv":
            (outputs, inputs), group = stored.shape, self.scale_group(share)
            wide = spread(part, (outputs, inputs // group), FP8_BLOCK // group)
            return share.cut(stored, wide)
        return share.cut(stored, part.view(torch.uint8))


def made(
    checkpoint: "Checkpoint", table: Iterable[Weight], share: Share = WHOLE
) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight of a rank's table as the engine holds it, one at a time.

    Weights are fp32, but those with a format come as values and scales. Stacked experts come one by
    one: as rows [1, ..] of one name, and their values and scales in turn. share: the table's.
    """
    return chain.from_iterable(weight.made(checkpoint, share) for weight in table)


def whole(pieces: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Join the rows that `made` yields of each weight."""
    for _, owned in groupby(pieces, lambda named: weight_of(named[0])):
        rows = dict[str, list[Tensor]]()
        for name, piece in owned:
            rows.setdefault(name, []).append(piece)
        for name, found in rows.items():
            yield name, torch.cat(found) if len(found) > 1 else found[0]


def weight_of(name: str) -> str:
    """The weight of which a tensor in the engine is all, or the values or scales."""
    weight, _, leaf = name.rpartition(".")
    return weight if leaf in PARTS else name


def vector(to: str, at: str, name: str, size: int) -> Weight:
    """A vector that has the same name in the module `to` as in the checkpoint's `at`."""
    return Weight(f"{to}.{name}", (Stored(f"{at}.{name}", (size,)),))


def embedding(to: str, stored: Stored) -> Weight:
    """Checkpoint [vocabulary, hidden] -> the same in the program."""
    return Weight(to, (stored,), rows=stack_rows, looked_up=True)


def product(to: str, *stored: Stored, rows: Transform = stack_rows, joined: int = 0) -> Weight:
    """Checkpoint [out, in] -> program [in, out]: the graph is `x @ w` without a Transpose."""
    return Weight(to, stored, lambda *w: rows(*w).T, rows, joined=joined)


def projection(at: str, proj: str, hidden: int, inner: int, routed: bool = False) -> Stored:
    """An MLP's product; ranks split its inner columns."""
    down = proj == "down"
    shape = (hidden, inner) if down else (inner, hidden)
    return Stored(f"{at}.{proj}_proj.weight", shape, int(down), routed)


def mlp(hidden: int, inner: int, at: str, to: str) -> Iterator[Weight]:
    gate, up, down = (projection(at, p, hidden, inner) for p in ("gate", "up", "down"))
    yield product(f"{to}.gate_up_proj", gate, up)
    yield product(f"{to}.down_proj", down)


def decoder_layer(
    c: ModelConfig, at: str, to: str, attention: Iterable[Weight], feed_forward: Iterable[Weight]
) -> Iterator[Weight]:
    """The weights of one layer, around those of its two halves."""
    yield vector(to, at, "input_layernorm.weight", c.hidden_size)
    yield from attention
    yield vector(to, at, "post_attention_layernorm.weight", c.hidden_size)
    yield from feed_forward


def module_weights(
    c: ModelConfig, layer: Callable[[int, str], Iterator[Weight]]
) -> Iterator[Weight]:
    """The MTP modules' weights where they are layers behind the trunk's (DeepSeek, GLM)."""
    E, V = c.hidden_size, c.vocab_size
    for j in range(c.num_nextn_predict_layers):
        index, to = c.num_hidden_layers + j, f"mtp.{j}"
        at = f"model.layers.{index}"
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            yield vector(to, at, f"{norm}.weight", E)
        yield product(f"{to}.eh_proj", Stored(f"{at}.eh_proj.weight", (E, 2 * E), axis=1))
        yield from layer(index, to)
        if j in c.own_embeddings:  # not the trunk's
            yield embedding(f"{to}.embed_tokens", Stored(f"{at}.embed_tokens.weight", (V, E), 0))
        if j in c.own_heads:
            head = Stored(f"{at}.shared_head.head.weight", (V, E), axis=0)
            yield product(f"{to}.lm_head", head, rows=drafted_rows(c))


def drafted_rows(c: ModelConfig) -> Transform:
    """The rows of a head that drafts are chosen by: all, unless their vocabulary is reduced."""
    ids = torch.tensor(c.draft_ids)
    return (lambda head: head[ids]) if c.draft_ids else stack_rows


def whole_table(
    c: ModelConfig, layer: Callable[[int, str], Iterator[Weight]], modules: Iterable[Weight]
) -> list[Weight]:
    """A whole table in the order of use; `layer` makes a layer's weights under the given name."""
    shape = (c.vocab_size, c.hidden_size)
    tokens = Stored(EMBEDDING, shape, axis=0)
    head = tokens if c.tie_word_embeddings else Stored(HEAD, shape, axis=0)
    reduced = [product("draft_head", head, rows=drafted_rows(c))] if c.draft_ids else []
    return [
        embedding("embed_tokens", tokens),
        *chain.from_iterable(layer(i, f"layers.{i}") for i in range(c.num_hidden_layers)),
        vector("norm", "model.norm", "weight", c.hidden_size),
        *modules,
        product("lm_head", head),
        *reduced,
    ]
