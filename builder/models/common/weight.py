"""Weight tables, whose rows convert a checkpoint's weights to an engine's.

Stored tensors are cut to the share of a rank, then joined, permuted or stacked. The functions at
the end declare the weights that all families have: vectors, products, MLPs, embedding and head.
"""

from __future__ import annotations  # Tensor is imported for types alone

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain, groupby
from math import gcd, prod
from typing import TYPE_CHECKING, Protocol, TypeAlias

from mtpbuild.builder.checkpoint.config import ModelConfig
from mtpbuild.builder.formats import Format, refuse_out_of_range
from mtpbuild.builder.formats.integers import MixedIntegers
from mtpbuild.builder.lazy_torch import torch
from mtpbuild.builder.models.common.copies import EMBEDDING, HEAD
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from torch import Tensor

Transform: TypeAlias = "Callable[..., Tensor]"
# (number of a layer, its name in the checkpoint, its name in the program) -> some of its weights
Layer: TypeAlias = "Callable[[int, str, str], Iterable[Weight]]"
FORMAT_PARTS = ("values", "scales", "scales_2")  # names of a format's parts in an engine, in order


# Integer engines quantise a stack of per-head products from this size on. A smaller stack
# takes a few percent of a step's time in fp32; a stack of 2^18 took a sixth of a step (int8, 0.95
# billion parameters).
MIN_PER_HEAD_ELEMENTS = 1 << 18
# Exponents of a delta rule: their rounding error adds up over tokens.
EXPONENTS = (".decay_rate", ".decay_bias")
DRAFT_HEAD = "draft_head"
IDS = ".token_ordering"  # of tokens
ROUTERS = (".gate.", ".weights_proj")  # parts of names


def stack_rows(*w: Tensor) -> Tensor:
    """Concatenate projections of the same input: [out_i, ..] each -> [sum of out_i, ..]."""
    return torch.cat(w) if len(w) > 1 else w[0]


def in_turn(*w: Tensor) -> Tensor:
    """Interleave the outputs of projections: [out, ..] each -> [1, out * number, ..]."""
    return torch.stack(w, dim=1).flatten(0, 1)[None]


def stays_fp32(name: str, for_gpu: bool) -> bool:
    """Return whether a weight is fp32 in engines of any dtype; so is a head, on CPUs alone."""
    head = name.endswith(("lm_head", "draft_head")) and not for_gpu
    return head or any(part in name for part in ROUTERS) or name.endswith((*EXPONENTS, IDS))


class Layout(Enum):
    """The order of a weight's numbers in an engine, and the suffix of the tensor's name."""

    PLAIN = ""  # as its transform makes it
    ROWS = "rows"  # experts by outputs: rows of gate and up alternate
    PACKED = "values"  # panels of the CPU's kernels


@dataclass(frozen=True)
class StoredTensor:
    """A weight of the checkpoint, with its shape by the configuration."""

    name: str
    shape: tuple[int, ...]
    axis: int | None = None  # axis that ranks split; None: each rank holds the whole weight
    routed: bool = False  # a routed expert's weight, of which only some ranks hold a part
    sections: tuple[int, ...] = ()  # sizes along the axis; ranks split each section
    has_ids: bool = False  # whole numbers, which the engine holds in fp32


@dataclass(frozen=True)
class Share:
    """The part of a model that one of several ranks holds.

    All ranks have the same graph; only their weights differ.
    """

    ranks: Ranks = ALONE
    rank: int = 0

    def experts(self, count: int) -> range:
        """Return the ids of the routed experts that this rank holds, whole or in part.

        As in TensorRT-LLM, neighbouring ranks are in different groups.
        """
        size, group = count // self.ranks.ep, self.rank % self.ranks.ep
        return range(group * size, (group + 1) * size)

    def cut(self, stored: StoredTensor, tensor: Tensor) -> Tensor:
        """Return this rank's part of a checkpoint's tensor."""
        parts, part = self.ranks.parts, self.rank
        if stored.routed:
            parts, part = self.ranks.tp // self.ranks.ep, self.rank // self.ranks.ep
        if stored.axis is None or parts == 1:
            return tensor
        cut: list[Tensor] = []
        for section in tensor.split(stored.sections or tensor.shape[stored.axis], stored.axis):
            size = section.shape[stored.axis] // parts
            cut.append(section.narrow(stored.axis, part * size, size))
        return torch.cat(cut, stored.axis) if len(cut) > 1 else cut[0]

    def shape(self, stored: StoredTensor) -> tuple[int, ...]:
        """Return the shape of this rank's part."""
        parts = self.ranks.tp // self.ranks.ep if stored.routed else self.ranks.parts
        return tuple(
            size // parts if axis == stored.axis else size for axis, size in enumerate(stored.shape)
        )


WHOLE = Share()


class Readable(Protocol):
    """The part of a checkpoint that conversion needs."""

    def read(self, name: str) -> Tensor:
        """Read a weight in fp32."""

    def read_engine_parts(self, name: str, engine_format: Format | None) -> dict[str, Tensor]:
        """Read a quantised weight's parts in the format in which an engine holds it."""


@dataclass(frozen=True)
class Weight:
    """A row of a weight table: the stored weights and the transform that make one engine weight.

    `name` is the weight's name in the program's state_dict.
    """

    name: str
    stored: tuple[StoredTensor, ...]
    transform: Transform = stack_rows  # makes one slice from the slice's stored tensors
    # For products: the same, but with outputs first, [out, ..]. It may permute a stored tensor's
    # outputs; those of the next one come after them.
    rows: Transform | None = None
    slices: int = 1  # number of slices, which are stacked along a first axis
    # For products: the axis of [out, in] along which stored tensors are concatenated.
    concat_axis: int | None = None
    looked_up: bool = False  # an embedding: token ids select its rows
    per_head: tuple[int, ...] = ()  # for a stack of per-head products: its shape [H, in, out]
    format: Format | None = None  # the format in which the engine holds it; None: floats
    layout: Layout = Layout.PLAIN

    @property
    def slices_of_stored(self) -> Iterator[tuple[StoredTensor, ...]]:
        """The stored weights of each slice."""
        size = len(self.stored) // self.slices
        return (self.stored[i : i + size] for i in range(0, len(self.stored), size))

    @property
    def paired(self) -> bool:
        """Whether each slice has an expert's gate and up projections."""
        return self.slices > 1 and len(self.stored) > self.slices

    @property
    def packed(self) -> bool:
        """Whether the weight is in the layout of the CPU's kernels."""
        return self.layout is Layout.PACKED

    @property
    def multiplied(self) -> bool:
        """Whether the weight is a product or a stack of them, so that it can be packed."""
        return self.concat_axis is not None or bool(self.per_head)

    @property
    def large_per_head(self) -> bool:
        """Whether the weight is a stack of per-head products large enough to quantise."""
        return bool(self.per_head) and prod(self.per_head) >= MIN_PER_HEAD_ELEMENTS

    @property
    def tensors(self) -> dict[str, str]:
        """The weight's tensors in the engine: name -> suffix of the format's part."""
        if self.format is None:
            return {f"{self.name}.{self.layout.value}" if self.layout.value else self.name: ""}
        parts = zip(FORMAT_PARTS, self.format.suffixes, strict=False)
        return {f"{self.name}.{part}": suffix for part, suffix in parts}

    @property
    def formats_by_stored(self) -> Iterator[tuple[StoredTensor, Format | None]]:
        """The stored weights, each with the format in which the engine holds it."""
        if isinstance(self.format, MixedIntegers):
            return zip(self.stored, self.format.formats, strict=True)
        return ((stored, self.format) for stored in self.stored)

    def scale_group(self, share: Share) -> int:
        """Return how many inputs share a scale after ranks have cut the format's blocks."""
        assert self.format is not None
        return gcd(self.format.block, *(share.shape(stored)[1] for stored in self.stored))

    def convert(self, checkpoint: Readable, share: Share) -> Iterator[tuple[str, Tensor]]:
        """Yield the weight's engine tensors, contiguous; a stacked weight comes slice by slice."""
        formats = {stored.name: format for stored, format in self.formats_by_stored}
        for group in self.slices_of_stored:
            if self.format is not None and not self.per_head:
                parts = [checkpoint.read_engine_parts(w.name, formats[w.name]) for w in group]
                for name, suffix in self.tensors.items():
                    part = [tensors[suffix] for tensors in parts]
                    joined = self._join_part(self.format, suffix, group, part, share)
                    yield name, joined.contiguous()
                continue
            # Stored tensors are bound to no name, so they are freed before the slice is copied.
            join = in_turn if self.layout is Layout.ROWS else self.transform
            slice = join(*[share.cut(stored, checkpoint.read(stored.name)) for stored in group])
            if self.format is None:
                (name,) = self.tensors
                yield name, self._read_floats(slice).contiguous()
            else:
                yield from self._encode_by_head(self.format, slice)

    def _read_floats(self, slice: Tensor) -> Tensor:
        """Return an unquantised slice in the weight's layout."""
        if not self.packed:
            return slice
        from mtpbuild.plugins.cpu.layout import pack_floats, pack_pairs

        return pack_floats(pack_pairs(slice) if self.paired else slice)

    def _encode_by_head(self, format: Format, heads: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Quantise each head's product: the checkpoint's blocks may not lie along its inputs.

        heads: fp32 [H, in, out].
        """
        if not heads.is_meta:  # as those of a dry run are
            refuse_out_of_range(format, self.stored[0].name, heads.transpose(-1, -2))
        encoded = [format.encode(head.T.contiguous()) for head in heads]
        for name, suffix in self.tensors.items():
            yield name, torch.stack([format.pack(suffix, parts[suffix]) for parts in encoded])

    def _join_part(
        self,
        format: Format,
        suffix: str,
        group: tuple[StoredTensor, ...],
        parts: list[Tensor],
        share: Share,
    ) -> Tensor:
        """Join one part of each stored weight of a slice into the engine's tensor of the slice."""
        inputs = self.scale_group(share)
        rows: list[Tensor] = []
        for stored, part in zip(group, parts, strict=True):
            try:
                part_rows = format.rows(suffix, part, stored.shape, inputs)
            except CheckpointError as error:
                raise CheckpointError(f"{stored.name} {error}") from None
            rows.append(share.cut(stored, part_rows))
        if not format.packs:
            return format.finish(suffix, self.transform(*rows), self.concat_axis)
        if self.rows is not None:
            joined = self.rows(*rows)
        else:
            from mtpbuild.plugins.cpu.layout import reorder_gates

            joined = reorder_gates(in_turn(*rows)) if self.paired else in_turn(*rows)
        return format.pack(suffix, joined) if self.packed else joined


def convert_weights(
    checkpoint: Readable, table: Iterable[Weight], share: Share = WHOLE
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a rank's table as the engine holds them, one at a time.

    Weights with a format come as values and scales, all others in fp32. Stacked experts come one by
    one, as rows [1, ..] under the same name. share: the share for which the table was made.
    """
    return chain.from_iterable(weight.convert(checkpoint, share) for weight in table)


def join_slices(pieces: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Concatenate the rows that `convert` yields for each weight."""
    for _, owned in groupby(pieces, lambda named: find_weight_of(named[0])):
        rows: dict[str, list[Tensor]] = {}
        for name, piece in owned:
            rows.setdefault(name, []).append(piece)
        for name, slices in rows.items():
            yield name, torch.cat(slices) if len(slices) > 1 else slices[0]


def find_weight_of(name: str) -> str:
    """Return the name of the weight that an engine's tensor belongs to."""
    weight, _, leaf = name.rpartition(".")
    return weight if leaf in FORMAT_PARTS else name


def vector(to: str, at: str, name: str, size: int) -> Weight:
    """Declare a vector that the checkpoint has in module `at`, the program in module `to`."""
    return Weight(f"{to}.{name}", (StoredTensor(f"{at}.{name}", (size,)),))


def embedding(to: str, stored: StoredTensor) -> Weight:
    """Declare an embedding [vocabulary, hidden], the same in checkpoint and program."""
    return Weight(to, (stored,), rows=stack_rows, looked_up=True)


def product(to: str, *stored: StoredTensor, rows: Transform = stack_rows, axis: int = 0) -> Weight:
    """Declare a product: the checkpoint's [out, in] becomes [in, out], so graphs do `x @ w`."""
    return Weight(to, stored, lambda *w: rows(*w).T, rows, concat_axis=axis)


def projection(at: str, proj: str, hidden: int, inner: int, routed: bool = False) -> StoredTensor:
    """Declare a stored projection of an MLP; ranks split its inner dimension."""
    down = proj == "down"
    shape = (hidden, inner) if down else (inner, hidden)
    return StoredTensor(f"{at}.{proj}_proj.weight", shape, int(down), routed)


def mlp(hidden: int, inner: int, at: str, to: str) -> Iterator[Weight]:
    gate, up, down = (projection(at, p, hidden, inner) for p in ("gate", "up", "down"))
    yield product(f"{to}.gate_up_proj", gate, up)
    yield product(f"{to}.down_proj", down)


def list_markov_weights(at: str, to: str, vocab_size: int, rank: int) -> Iterator[Weight]:
    """Yield the weights of a bias of drafts by the token before."""
    shape = vocab_size, rank
    yield embedding(f"{to}.markov_w1", StoredTensor(f"{at}.markov_w1.weight", shape))
    yield product(f"{to}.markov_w2", StoredTensor(f"{at}.markov_w2.weight", shape))


def list_module_weights(c: ModelConfig, layer: Layer) -> Iterator[Weight]:
    """Yield the weights of the MTP modules."""
    if c.head:
        return  # its rows are added to the table
    E, V, names = c.hidden_size, c.vocab_size, c.module_names
    norms = {"enorm": names.embedding_norm, "hnorm": names.hidden_norm}
    norms["shared_head.norm"] = names.head_norm
    for j in range(c.num_nextn_predict_layers):
        at, to = c.name_module(j), f"mtp.{j}"
        prefix = names.own_prefix or f"{at}."
        for ours, theirs in norms.items():
            yield Weight(f"{to}.{ours}.weight", (StoredTensor(f"{prefix}{theirs}.weight", (E,)),))
        input_proj = StoredTensor(f"{prefix}{names.input_proj}.weight", (E, 2 * E), axis=1)
        yield product(f"{to}.eh_proj", input_proj)
        yield from layer(c.num_hidden_layers + j, at, to)
        if j in c.own_embeddings:
            table = StoredTensor(f"{at}.embed_tokens.weight", (V, E), axis=0)
            yield embedding(f"{to}.embed_tokens", table)
        if j in c.own_heads:
            head = StoredTensor(f"{at}.shared_head.head.weight", (V, E), axis=0)
            yield product(f"{to}.lm_head", head, rows=pick_drafted_rows(c))


def pick_drafted_rows(c: ModelConfig) -> Transform:
    """Return a transform that picks a head's rows for the draft vocabulary, if it is reduced."""
    ids = torch.tensor(c.draft_ids)
    return (lambda head: head[ids]) if c.draft_ids else stack_rows


def make_weight_table(c: ModelConfig, attention: Layer, feed_forward: Layer) -> list[Weight]:
    """Return a model's whole table in the order of use, from the parts of its layers."""

    def layer(index: int, at: str, to: str) -> Iterator[Weight]:
        yield vector(to, at, "input_layernorm.weight", c.hidden_size)
        yield from attention(index, at, to)
        yield vector(to, at, "post_attention_layernorm.weight", c.hidden_size)
        yield from feed_forward(index, f"{at}.mlp", f"{to}.mlp")

    shape = (c.vocab_size, c.hidden_size)
    tokens = StoredTensor(EMBEDDING, shape, axis=0)
    head = tokens if c.tie_word_embeddings else StoredTensor(HEAD, shape, axis=0)
    reduced = [product(DRAFT_HEAD, head, rows=pick_drafted_rows(c))] if c.draft_ids else []
    trunk = (layer(i, f"model.layers.{i}", f"layers.{i}") for i in range(c.num_hidden_layers))
    return [
        embedding("embed_tokens", tokens),
        *chain.from_iterable(trunk),
        vector("norm", "model.norm", "weight", c.hidden_size),
        *list_module_weights(c, layer),
        product("lm_head", head),
        *reduced,
        *(Weight(name, (StoredTensor(name, shape),)) for name, shape in c.drafter_weights),
    ]
