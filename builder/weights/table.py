"""Choose how an engine holds its weights: a format and a layout for each row of a family's table.

The model, the weights file, `refit`, `plan` and the estimates of memory all follow this table.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

from mtpbuild.builder.formats import FORMATS, Format
from mtpbuild.builder.formats.integers import INT8, Integers, join_integers
from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.models import ModelConfig, find_family_of
from mtpbuild.builder.models.common.moe_weights import STACKS, find_modules_like_routed, with_shared
from mtpbuild.builder.models.common.weight import Layout, Share, StoredTensor, Weight
from mtpbuild.builder.models.heads import list_head_weights
from mtpbuild.builder.weights.scheme import find_weight_role
from mtpbuild.runtime.ranks import ALONE, Ranks

EMBEDDING_WEIGHT, HEAD_WEIGHT = "embed_tokens", "lm_head"  # in the table
FormatOf: TypeAlias = Callable[[StoredTensor], Format | None]  # of a weight in the checkpoint


@dataclass(frozen=True)
class WeightTable:
    """The weights of an engine, in the order of use.

    All ranks hold a weight in the same format and layout, so that they share graphs.
    """

    config: ModelConfig
    ranks: Ranks
    weights: tuple[Weight, ...]  # with the experts of all ranks
    joined: Set[str] = frozenset()  # MoE modules whose stack ends with the shared expert

    def __iter__(self) -> Iterator[Weight]:
        return iter(self.weights)

    def of_rank(self, rank: int) -> list[Weight]:
        """Return the weights of one rank."""
        if self.ranks == ALONE:
            return [*self.weights]
        held = {weight.name: weight for weight in self.weights}
        table = list_weights(self.config, Share(self.ranks, rank))
        return [
            replace(weight, format=held[weight.name].format, layout=held[weight.name].layout)
            for weight in with_shared(table, self.joined)
        ]

    @property
    def formats(self) -> dict[str, Format]:
        """The formats of weights that stay quantised, by name."""
        return {weight.name: weight.format for weight in self.weights if weight.format is not None}

    @property
    def stored(self) -> dict[str, StoredTensor]:
        """The checkpoint's weights, by name."""
        return {stored.name: stored for weight in self.weights for stored in weight.stored}

    @property
    def shares_embedding(self) -> bool:
        """Whether the head's weight is the embedding, too."""
        return all(weight.name != EMBEDDING_WEIGHT for weight in self.weights)

    @property
    def stored_formats(self) -> dict[str, Format | None]:
        """The format in which the engine holds each weight of the checkpoint, by name."""
        return {
            stored.name: format
            for each in self.weights
            for stored, format in each.formats_by_stored
        }

    @property
    def parameters(self) -> int:
        """The parameters of the checkpoint; an embedding that is tied to the head counts once."""
        return sum(prod(stored.shape) for stored in self.stored.values())


def make_family_table(config: ModelConfig, ranks: Ranks = ALONE) -> WeightTable:
    """Return a family's weights as floats, with the experts of all ranks."""
    share = Share(Ranks(attention_dp=ranks.attention_dp))
    return WeightTable(config, ranks, tuple(list_weights(config, share)))


def list_weights(config: ModelConfig, share: Share) -> list[Weight]:
    """Return a family's table, with the rows of a joined head if there is one."""
    return list_head_weights(config, find_family_of(config).weight_table(config, share))


def choose_formats(table: WeightTable, format_of: FormatOf, style: GraphStyle) -> WeightTable:
    """Return a family's table with the format and the layout of each weight in an engine."""
    share = Share(table.ranks)
    possible = {
        weight.name: _choose_kept_formats(weight, format_of, table.config, style)
        for weight in table.weights
    }
    may_join = find_modules_like_routed(table.weights, share) if style.joins_experts else set[str]()
    joined = _find_same_formats(possible, may_join)
    weights = with_shared(table.weights, joined)
    formats = dict[str, Format]()
    for weight in weights:
        kept = possible[weight.name]
        if any(format is None or format.name not in style.formats for format in kept):
            continue
        format = _join_formats(weight, kept)
        if format is not None and _kernels_support(replace(weight, format=format), share):
            formats[weight.name] = format
    formats = _drop_unpaired(weights, formats)
    if style.packs_weights:
        formats |= _choose_per_head_formats(weights, formats)
    held = (
        replace(each, format=formats.get(each.name), layout=_choose_layout(each, formats, style))
        for each in weights
    )
    table = replace(table, weights=tuple(held), joined=joined)
    return _share_embedding(table) if table.ranks == ALONE else table


def _share_embedding(table: WeightTable) -> WeightTable:
    """Leave out an embedding that is tied to a packed head of the same format.

    Programs look rows up in the head's weight.
    """
    named = {weight.name: weight for weight in table.weights}
    embedding, head = (named[name] for name in (EMBEDDING_WEIGHT, HEAD_WEIGHT))
    if not head.packed or (embedding.stored, embedding.format) != (head.stored, head.format):
        return table
    return replace(table, weights=tuple(w for w in table.weights if w is not embedding))


def _choose_per_head_formats(
    weights: Iterable[Weight], formats: Mapping[str, Format]
) -> dict[str, Format]:
    """Return the formats of `kv_b_proj`, which attention reads as a product for each head.

    In layers whose o_proj is in integers it is int8. In fp32 these products of a 10B model would be
    a third of the bytes that a token reads.
    """
    chosen = dict[str, Format]()
    for weight in weights:
        o_proj = formats.get(f"{_name_module_of(weight.name)}.o_proj")
        if weight.large_per_head and o_proj is not None and o_proj.packs:
            _, inputs, outputs = weight.per_head
            if INT8.fits((outputs, inputs)):
                chosen[weight.name] = INT8
    return chosen


def _choose_kept_formats(
    weight: Weight, format_of: FormatOf, config: ModelConfig, style: GraphStyle
) -> tuple[Format | None, ...]:
    """Return the formats in which engines keep the tensors that a weight is made from."""

    def keep(stored: StoredTensor) -> Format | None:
        if (format := format_of(stored)) is None:
            return None
        kept, supported = format.engine_format, format.engine_format.name in style.formats
        if style.rounds_to is None or (supported and kept.offsets is None):
            return kept
        if not find_weight_role(config, stored.name):
            return None  # a router, or a delta rule's exponents
        rounded = FORMATS[style.rounds_to]
        return kept if supported else rounded if rounded.fits(stored.shape) else None

    return tuple(map(keep, weight.stored))


def _join_formats(weight: Weight, kept: tuple[Format | None, ...]) -> Format | None:
    """Return the format of a weight by those of its tensors; None if it has to be floats."""
    if weight.looked_up and isinstance(kept[0], Integers):
        return kept[0] if kept[0].looks_up else INT8
    if len(set(kept)) == 1:
        return kept[0]
    integers = tuple(format for format in kept if isinstance(format, Integers))
    if len(integers) == len(kept) and weight.slices == 1 and weight.rows is not None:
        return join_integers(integers, tuple(stored.shape[0] for stored in weight.stored))
    return None


def _find_same_formats(
    formats: Mapping[str, tuple[Format | None, ...]], modules: Set[str]
) -> set[str]:
    """Return the MoE modules whose shared expert has the same formats as all their routed ones."""

    def fits(module: str) -> bool:
        pairs = ((f"{module}.{leaf}", f"{module}.shared_experts.{leaf}") for leaf in STACKS)
        return all(set(formats[routed]) == set(formats[shared]) for routed, shared in pairs)

    return set(filter(fits, modules))


def _kernels_support(weight: Weight, share: Share) -> bool:
    """Return whether programs can compute with the weight's format."""
    format = weight.format
    assert format is not None
    fits = format.looks_up if weight.looked_up else weight.concat_axis is not None
    return fits and format.can_split(share.ranks.tp, weight.scale_group(share))


def _drop_unpaired(weights: Iterable[Weight], formats: Mapping[str, Format]) -> dict[str, Format]:
    """Drop integer formats of experts if only one of their two products is in integers."""
    stacks = (weight for weight in weights if weight.slices > 1)
    unpacked = (w.name for w in stacks if w.name not in formats or not formats[w.name].packs)
    odd = {*map(_name_module_of, unpacked)}
    return {n: f for n, f in formats.items() if not f.packs or _name_module_of(n) not in odd}


def _choose_layout(weight: Weight, formats: Mapping[str, Format], style: GraphStyle) -> Layout:
    """Return the layout of a weight."""
    if style.packs_weights:
        return Layout.PACKED if weight.multiplied else Layout.PLAIN
    quantised = any(f"{_name_module_of(weight.name)}.{leaf}" in formats for leaf in STACKS)
    rows = not style.for_gpu and weight.slices > 1 and not quantised
    return Layout.ROWS if rows else Layout.PLAIN


def _name_module_of(name: str) -> str:
    return name.rpartition(".")[0]
