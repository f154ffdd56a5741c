"""Quantised weights that stay so in an engine: which can, and what is stored of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import torch
from torch import Tensor, nn

from mtpbuild.builder.models.common.blocks import Blocks, EmbeddingBlocks, ExpertBlocks, Scaled
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
        if self.weight.looked_up:
            return EmbeddingBlocks(*shape)
        if isinstance(self.format, Integers):
            *experts, inputs, outputs = shape
            if experts:
                return ExpertBlocks(experts[0], inputs, outputs, self.format.bits)
            return Blocks(inputs, outputs, self.format.bits)
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


NONE: Mapping[str, Kept] = {}


def weight_of(stored: str) -> str:
    """The program's weight of which a tensor in the engine is all, or values or scales."""
    weight, _, leaf = stored.rpartition(".")
    return weight if leaf in NAMES else stored


def can_stay(kept: Kept) -> bool:
    """Tell if the program has an op for it: integers can't be cut for ranks, nor small blocks."""
    if kept.weight.looked_up:
        return kept.format is INT8 and kept.share.ranks.tp == 1
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


def plain_experts(table: list[Weight], kept: Mapping[str, Kept]) -> set[str]:
    """Name the stacked weights of experts of which neither product stays in a format."""
    quantised = {name.rpartition(".")[0] for name in kept}
    stacked = (weight.name for weight in table if weight.slices > 1)
    return {name for name in stacked if name.rpartition(".")[0] not in quantised}
