"""Quantised weights that stay so in an engine: which can, and what is stored of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor, nn

from mtpbuild.builder.model.blocks import Blocks, Scaled
from mtpbuild.builder.model.weights import Source, Weight
from mtpbuild.builder.quantize.format import Format
from mtpbuild.builder.quantize.fp8 import BLOCK
from mtpbuild.builder.quantize.integers import Integers
from mtpbuild.builder.quantize.nvfp4 import GROUP, Nvfp4

NAMES = ("values", "scales", "scales_2")  # of a format's parts, in their order


@dataclass(frozen=True)
class Kept:
    """A weight of the program whose sources are all in one format, and stay in it."""

    weight: Weight
    format: Format

    @property
    def stored(self) -> dict[str, str]:
        """Name of each tensor in the engine -> suffix of the checkpoint's part."""
        pairs = zip(NAMES, self.format.parts((1, 1)), strict=False)
        return {f"{self.weight.name}.{name}": suffix for name, suffix in pairs}

    @property
    def group(self) -> int:
        """Inputs that share a scale; what does not end with a block cuts all of them in pieces."""
        if isinstance(self.format, Nvfp4):
            return GROUP
        return gcd(BLOCK, *(source.shape[1] for source in self.weight.sources))

    def module(self, shape: tuple[int, ...]) -> nn.Module:
        """In the place of a parameter of this shape."""
        if isinstance(self.format, Integers):
            return Blocks(shape[0], shape[1], self.format.bits)
        second = (shape[-2] // GROUP, 1) if self.weight.joined == 1 else (1, shape[-1])
        return Scaled(shape, self.group, second if isinstance(self.format, Nvfp4) else None)

    def join(self, suffix: str, sources: tuple[Source, ...], parts: Sequence[Tensor]) -> Tensor:
        """One tensor of the engine, or the slice of it that these sources are."""
        if isinstance(self.format, Integers):
            assert self.weight.rows is not None
            return self.weight.rows(*parts).contiguous()
        rows = (self._rows(suffix, s, part) for s, part in zip(sources, parts, strict=True))
        return self.weight.transform(*rows).contiguous()

    def _rows(self, suffix: str, source: Source, part: Tensor) -> Tensor:
        """A part as [out, ..], so that outputs can be permuted and joined as the weight's are."""
        outputs, inputs = source.shape
        if suffix == "_scale_2":
            shape = (1, inputs // GROUP) if self.weight.joined == 1 else (outputs, 1)
            return part.expand(shape)
        if suffix == "_scale_inv":
            tall = part.repeat_interleave(BLOCK, dim=0)[:outputs]
            wide = tall.repeat_interleave(BLOCK // self.group, dim=1)
            return wide[:, : inputs // self.group]
        return part.view(torch.uint8)


def can_stay(weight: Weight, format: Format) -> bool:
    """Integers in what is one product, the others in experts of which some are chosen too."""
    if isinstance(format, Integers):
        return weight.rows is not None
    return weight.joined is not None and Kept(weight, format).group >= GROUP


NONE: Mapping[str, Kept] = {}
