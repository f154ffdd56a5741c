"""Quantised weights that stay so in an engine: which can, and what is stored of them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import torch
from torch import Tensor, nn

from mtpbuild.builder.models.common.blocks import (
    Blocks,
    EmbeddingBlocks,
    ExpertBlocks,
    HeadBlocks,
    Scaled,
)
from mtpbuild.builder.models.common.weights import WHOLE, Share, Source, Weight
from mtpbuild.builder.quantize.formats import (
    FP8_BLOCK,
    GROUP,
    INT8,
    Format,
    Integers,
    Nvfp4,
    spread,
)

NAMES = ("values", "scales", "scales_2")  # of a format's parts, in their order
PAIR = {"gate_up_proj": "down_proj", "down_proj": "gate_up_proj"}


@dataclass(frozen=True)
class Kept:
    """A weight of the program whose sources are all in one format, and stay in it.

    share: the weight's, whose sources are cut along their own axes.
    """

    weight: Weight
    format: Format
    share: Share = WHOLE

    @property
    def stored(self) -> dict[str, str]:
        """Name of each tensor in the engine -> suffix of the checkpoint's part."""
        pairs = zip(NAMES, self.format.parts((1, 1)), strict=False)
        return {f"{self.weight.name}.{name}": suffix for name, suffix in pairs}

    @cached_property
    def group(self) -> int:
        """Inputs that share a scale; what does not end with a block cuts all of them in pieces."""
        widths = (self._own_shape(source)[1] for source in self.weight.sources)
        return gcd(GROUP if isinstance(self.format, Nvfp4) else FP8_BLOCK, *widths)

    def module(self, shape: tuple[int, ...]) -> nn.Module:
        """Make what replaces a parameter of this shape."""
        if isinstance(self.format, Integers):
            scales = self.format.scales
            if self.weight.looked_up:
                vocabulary, width = shape
                return EmbeddingBlocks(vocabulary, width, scales)
            *experts, inputs, outputs = shape
            if experts:
                return ExpertBlocks(experts[0], inputs, outputs, self.format.bits, scales)
            return Blocks(inputs, outputs, self.format.bits, scales)
        second = (shape[-2] // GROUP, 1) if self.weight.joined == 1 else (1, shape[-1])
        return Scaled(shape, self.group, second if isinstance(self.format, Nvfp4) else None)

    def join(self, suffix: str, sources: tuple[Source, ...], parts: list[Tensor]) -> Tensor:
        """One tensor of the engine, or the slice of it that these sources are."""
        if isinstance(self.format, Integers):
            if self.weight.rows is not None:
                return self.weight.rows(*parts).contiguous()
            return torch.stack(parts, dim=1).reshape(1, -1, parts[0][0].numel())  # outputs in turn
        rows = (self._rows(suffix, s, part) for s, part in zip(sources, parts, strict=True))
        return self.weight.transform(*rows).contiguous()

    def _rows(self, suffix: str, source: Source, part: Tensor) -> Tensor:
        """A part as [out, ..], so that outputs can be permuted and joined as the weight's are."""
        if suffix == "_scale_2":
            outputs, inputs = self._own_shape(source)
            return part.expand((1, inputs // GROUP) if self.weight.joined == 1 else (outputs, 1))
        if suffix == "_scale_inv":
            outputs, inputs = source.shape
            wide = spread(part, (outputs, inputs // self.group), FP8_BLOCK // self.group)
            return self.share.cut(source, wide)
        return self.share.cut(source, part.view(torch.uint8))

    def _own_shape(self, source: Source) -> tuple[int, ...]:
        return self.share.cut(source, torch.empty(source.shape, device="meta")).shape


@dataclass(frozen=True)
class KeptHeads(Kept):
    """A product for each head that the checkpoint has in floats, all of them as one weight.

    Its inputs are not that one's columns, so no checkpoint has it in blocks: they are made here.
    """

    format: Integers

    @property
    def shape(self) -> tuple[int, ...]:
        """Give the shape that the program has it in: [H, in, out]."""
        sources = (torch.empty(source.shape, device="meta") for source in self.weight.sources)
        return self.weight.transform(*sources).shape

    @property
    def stored(self) -> dict[str, str]:
        name, suffixes = self.weight.name, self.format.parts((1, 1))
        each = [*zip(NAMES, suffixes, strict=False)]
        return {f"{name}.{h}.{part}": s for h in range(self.shape[0]) for part, s in each}

    def module(self, shape: tuple[int, ...]) -> nn.Module:
        heads, inputs, outputs = shape
        return HeadBlocks(heads, inputs, outputs, self.format.scales)

    def encoded(self, *sources: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What is stored, of the sources in fp32."""
        for h, head in enumerate(self.weight.transform(*sources)):
            parts = self.format.encode(head.T.contiguous())
            for name, part in zip(NAMES, parts.values(), strict=False):
                yield f"{self.weight.name}.{h}.{name}", part


NONE: Mapping[str, Kept] = {}


def weight_of(stored: str) -> str:
    """The program's weight of which a tensor in the engine is all, or values or scales."""
    weight, _, leaf = stored.rpartition(".")
    return weight if leaf in NAMES else stored


def can_stay(kept: Kept) -> bool:
    """Tell if the program has an op for it: integers can't be cut for ranks, nor small blocks."""
    if kept.weight.looked_up:
        return kept.format.name == INT8.name and kept.share.ranks.tp == 1
    if isinstance(kept.format, Integers):
        return kept.weight.joined is not None and kept.share.ranks.tp == 1
    return kept.weight.joined is not None and kept.group >= GROUP


def in_pairs(kept: Mapping[str, Kept]) -> dict[str, Kept]:
    """Drop experts in integers whose other product is in another format: QMoE takes both."""

    def stays(each: Kept) -> bool:
        if each.weight.slices == 1 or not isinstance(each.format, Integers):
            return True
        layer, _, leaf = each.weight.name.rpartition(".")
        other = kept.get(f"{layer}.{PAIR[leaf]}")
        return other is not None and other.format is each.format

    return {name: each for name, each in kept.items() if stays(each)}


def kept_heads(weights: Iterable[Weight], kept: Mapping[str, Kept]) -> Iterator[KeptHeads]:
    """Yield the products by head that go to int8 because the products around them are integers.

    In fp32 the absorbed projections of a 10B model are a third of the bytes that a token reads.
    """
    for weight in weights:
        layer, _, _ = weight.name.rpartition(".")
        beside = kept.get(f"{layer}.o_proj")
        if not weight.per_head or beside is None or not isinstance(beside.format, Integers):
            continue
        own = KeptHeads(weight, INT8)
        if INT8.fits(own.shape[:0:-1]):
            yield own


def plain_experts(table: list[Weight], kept: Mapping[str, Kept]) -> set[str]:
    """Name the stacked weights of experts of which neither product stays in a format."""
    quantised = {name.rpartition(".")[0] for name in kept}
    stacked = (weight.name for weight in table if weight.slices > 1)
    return {name for name in stacked if name.rpartition(".")[0] not in quantised}
