"""Integers in blocks, as our kernels for CPUs read them."""

from __future__ import annotations  # Tensor is imported for types alone

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mtpbuild.builder.formats.format import Entry, Format, Shape, refuse_too_large
from mtpbuild.builder.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32  # columns that share a scale
FINEST = 2.0**-21  # below it, rounding to fp16 may change a scale by an eighth or more


class Integers(Format):
    """int8 or int4 with one scale per block of 32 columns.

    W = (value - zero) * weight_scale, with zero = 2 ** (bits - 1); in int4 the low nibble comes
    first. Scales are fp16, as in GGUF's Q4_0 and Q8_0, so int4 takes 4.5 bits a weight. Scales that
    are subnormal in fp16 are rounded away from zero, so that no value is clipped. Our older
    checkpoints have fp32 scales, which engines do not keep.
    """

    block = BLOCK
    suffixes: tuple[str, ...] = ("", "_scale")
    packs = True

    def __init__(self, bits: int, scales: str = "F16") -> None:
        self.name, self.bits, self.zero, self._scales = f"int{bits}", bits, 1 << bits - 1, scales
        self.looks_up = bits == 8

    def stores(self, name: str, entries: Mapping[str, Entry]) -> bool:
        """Return whether a uint8 weight has this format's bits, by its shape, and its scales."""
        weight, scale = entries[name], entries.get(f"{name}_scale")
        if weight.dtype != "U8" or scale is None or scale.dtype == "F8_E4M3":
            return False
        if len(weight.shape) == 2:
            return False  # MXFP4's, or ModelOpt's integers
        bits = 4 if weight.shape[-1] == BLOCK // 2 else 8
        return bits == self.bits and (scale.dtype == "F32") == (self._scales == "F32")

    @property
    def kept(self) -> Integers:
        return {4: INT4, 8: INT8}[self.bits]

    def keep(self, name: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Cast fp32 scales to fp16; if that is not exact, quantise the weight again."""
        if self is self.kept:
            return parts
        scales = parts["_scale"].half()
        if scales.is_meta or torch.equal(scales.float(), parts["_scale"]):
            return parts | {"_scale": scales}
        weight = self.decode(parts)
        refuse_too_large(self.kept, name, weight)
        return self.kept.encode(weight)

    def hold(self, name: str, values: Tensor, scales: Tensor) -> dict[str, Tensor]:
        """Return the parts of values [N, K] times scales [N, groups of columns], as they are.

        Where fp16 does not have the scales, they are rounded, or the weight is quantised again,
        whichever is closer.
        """
        times = values.shape[1] // scales.shape[1] // BLOCK
        scales = scales.float().repeat_interleave(times, dim=1)
        codes = (values.to(torch.int16) + self.zero).to(torch.uint8).unflatten(1, (-1, BLOCK))
        held = {"": self._nibbles(codes), "_scale": self._rounded(scales)}
        if scales.is_meta or torch.equal(held["_scale"].float(), scales):
            return held
        weight = (values.unflatten(1, (-1, BLOCK)).float() * scales[..., None]).flatten(1)
        refuse_too_large(self, name, weight)
        both = held, self.encode(weight)
        return min(both, key=lambda parts: (self.decode(parts) - weight).square().sum().item())

    def _nibbles(self, codes: Tensor) -> Tensor:
        return codes[..., 0::2] | codes[..., 1::2] << 4 if self.bits == 4 else codes

    @property
    def scales(self) -> torch.dtype:
        return Entry(self._scales, ()).type

    @property
    def most(self) -> float:
        return torch.finfo(self.scales).max * self.zero

    def fits(self, shape: Shape) -> bool:
        return shape[1] % BLOCK == 0

    def parts(self, shape: Shape) -> dict[str, Entry]:
        rows, blocks = shape[0], shape[1] // BLOCK
        packed = (rows, blocks, BLOCK * self.bits // 8)
        return {"": Entry("U8", packed), "_scale": Entry(self._scales, (rows, blocks))}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        from mtpbuild.plugins.cpu.layout import dequantise

        return dequantise(parts[""], parts["_scale"], self.bits)

    def encode(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        blocks = weight.unflatten(1, (-1, BLOCK))
        extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        # The value of largest magnitude is stored as -self.zero, since the negative side has one
        # more value. So scales may be negative.
        scales = self._rounded(extreme / -self.zero)
        scales = torch.where(scales != 0, scales, 1.0)
        values = (blocks / scales.float()).round().add(self.zero).clamp(0, 2 * self.zero - 1)
        return {"": self._nibbles(values.to(torch.uint8)), "_scale": scales.squeeze(-1)}

    def can_split(self, ranks: int, group: int) -> bool:
        return ranks == 1

    def pack(self, suffix: str, part: Tensor) -> Tensor:
        from mtpbuild.plugins.cpu.layout import packed_scales, packed_values

        return packed_values(part) if suffix == "" else packed_scales(part)

    def _rounded(self, scales: Tensor) -> Tensor:
        """Round scales to the nearest value of their type; round subnormal ones away from zero."""
        info = torch.finfo(self.scales)
        step = info.smallest_normal * info.eps  # between subnormal numbers
        away = (scales.abs() / step).ceil().mul(step).copysign(scales)
        return torch.where(scales.abs() < info.smallest_normal, away, scales).to(self.scales)


INT8, INT4 = Integers(8), Integers(4)
WIDE = {4: Integers(4, "F32"), 8: Integers(8, "F32")}  # with scales in fp32
FORMATS = (INT8, INT4, *WIDE.values())
METHODS = {"mtpbuild": lambda settings: None}
READS = "what `mtpbuild quantize` writes"


def coarse_blocks(scales: Tensor) -> int:
    """Count the blocks of integers that lose accuracy because their scale is too small for fp16."""
    if scales.dtype != torch.float16:
        return 0
    return int(((scales != 0) & (scales.abs() < FINEST)).sum())


def coarse_note(blocks: int) -> str:
    return (
        f"{blocks:,} blocks of {BLOCK} weights lose accuracy: they are so small that rounding "
        "their scale to fp16 changes it by up to an eighth, or more"
    )
