"""Integers in blocks, as our kernels for CPUs read them."""

from __future__ import annotations  # Tensor is imported for types alone

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mtpbuild.builder.formats.format import Entry, Format, Shape, refuse_too_large
from mtpbuild.builder.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32  # columns that share a scale
PANEL = 32  # outputs that the kernels for CPUs read together
GROUP = 4096  # blocks whose scales are chosen together: they stay in a processor's cache
# An int4 block's scale is its extreme over one of these numbers, then fitted to the values. The
# negative side has one more value, so the extreme is stored there, and scales may be negative.
STEPS = tuple(quarters / 4 for quarters in range(-36, -25))
FINEST = 2.0**-21  # below it, rounding to fp16 may change a scale by an eighth or more


class Integers(Format):
    """int8 or int4 with one scale per block of 32 columns.

    W = (value - zero) * weight_scale, with zero = 2 ** (bits - 1); in int4 the low nibble comes
    first. Scales are fp16, as in GGUF's Q4_0 and Q8_0, so int4 takes 4.5 bits a weight. Scales that
    are subnormal in fp16 are rounded away from zero. Our older checkpoints have fp32 scales, which
    engines do not keep.
    """

    block = BLOCK
    suffixes: tuple[str, ...] = ("", "_scale")
    packs = True

    def __init__(self, bits: int, scales: str = "F16") -> None:
        self.name, self.bits, self.zero, self._scales = f"int{bits}", bits, 1 << bits - 1, scales
        self.looks_up = bits == 8
        self.joined_bytes = BLOCK * bits // 8  # of a block's values when weights are joined

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

    def collect(self, codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
        """Return the parts of codes [N, K] and scales [N, K / 32]."""
        values = self._nibbles(codes.unflatten(1, (-1, BLOCK)))
        return {"": values.contiguous(), "_scale": scales.contiguous()}

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
        blocks = weight.reshape(-1, BLOCK)
        encoded = [self._encode_blocks(group) for group in blocks.split(GROUP)]
        values, scales = map(torch.cat, zip(*encoded, strict=True))
        shape = *weight.shape[:1], weight.shape[1] // BLOCK
        width = BLOCK * self.bits // 8
        return {"": values.reshape(*shape, width), "_scale": scales.reshape(shape)}

    def _encode_blocks(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Encode blocks [n, 32] as values [n, 16 or 32] and scales [n]."""
        scales = self.fit_scales(blocks)
        return self._nibbles(self.codes(blocks, scales)), scales.squeeze(-1)

    def fit_scales(self, blocks: Tensor) -> Tensor:
        """Return the scales [n, 1] of blocks [n, 32]."""
        extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        scales = self._rounded(extreme * self._fitted(blocks, extreme))
        return torch.where(scales != 0, scales, 1.0)

    def codes(self, values: Tensor, scales: Tensor) -> Tensor:
        """Return the nearest codes of values, in uint8; scales: of the same number of axes."""
        codes = (values / scales.float()).round_().clamp_(-self.zero, self.zero - 1)
        return codes.add_(self.zero).to(torch.uint8)

    def _fitted(self, blocks: Tensor, extreme: Tensor) -> Tensor | float:
        """Return scales over the blocks' extremes [n, 1].

        An int8 extreme is -128. In int4 each of STEPS gives values q for the block x. The scale of
        least squared error for them is x q / q q, which leaves x x - (x q)^2 / q q. Sums are in a
        fixed order, so that every machine chooses the same.
        """
        if self.bits == 8:
            return -1 / self.zero
        x = (blocks / torch.where(extreme != 0, extreme, 1.0)).T.contiguous()
        q, best, scales = torch.empty_like(x), x.new_zeros(len(blocks)), x.new_zeros(len(blocks))
        for step in STEPS:
            torch.mul(x, step, out=q).round_().clamp_(-self.zero, self.zero - 1)
            xq, qq = _sum_rows(x * q), _sum_rows(q * q)
            scale = xq / qq.clamp_(min=1)
            gain = xq * scale
            scales = torch.where(gain > best, scale, scales)
            best = torch.maximum(gain, best)
        return scales[:, None]

    def can_split(self, ranks: int, group: int) -> bool:
        return ranks == 1

    def rows(self, suffix: str, part: Tensor, shape: Shape, group: int) -> Tensor:
        """Return a part as it is, but int4 values among int8 ones as int8 of the same scale."""
        if suffix != "" or part.shape[-1] >= self.joined_bytes:
            return part
        return torch.stack([part & 0xF, part >> 4], dim=-1).flatten(-2) + (INT8.zero - INT4.zero)

    def pack(self, suffix: str, part: Tensor) -> Tensor:
        from mtpbuild.plugins.cpu.layout import packed_scales, packed_values

        return packed_values(part) if suffix == "" else packed_scales(part)

    def _rounded(self, scales: Tensor) -> Tensor:
        """Round scales to the nearest value of their type; round subnormal ones away from zero."""
        info = torch.finfo(self.scales)
        scales = scales.clamp(info.min, info.max)
        step = info.smallest_normal * info.eps  # between subnormal numbers
        away = (scales.abs() / step).ceil().mul(step).copysign(scales)
        return torch.where(scales.abs() < info.smallest_normal, away, scales).to(self.scales)


def _sum_rows(x: Tensor) -> Tensor:
    """Sum x [2^n, ..] over its first axis, halves first."""
    while len(x) > 1:
        half = len(x) // 2
        x = x[:half] + x[half:]
    return x[0]


INT8, INT4 = Integers(8), Integers(4)
WIDE = {4: Integers(4, "F32"), 8: Integers(8, "F32")}  # with scales in fp32
FORMATS = (INT8, INT4, *WIDE.values())
METHODS = {"mtpbuild": lambda settings: None}
READS = "what `mtpbuild quantize` writes"


class MixedIntegers(Integers):
    """A joined product whose first outputs are int4 and the others int8, in one packed weight.

    An int8 panel takes the place of two int4 ones. formats: of each joined weight.
    """

    def __init__(self, formats: tuple[Format | None, ...], fours: int, eights: int) -> None:
        super().__init__(4)
        self.joined_bytes = BLOCK
        self.formats, self.fours, self.eights = formats, fours, eights

    def pack(self, suffix: str, part: Tensor) -> Tensor:
        if suffix != "":
            return INT8.pack(suffix, part)
        fours, eights = part.split([self.fours, self.eights])
        fours = fours - (INT8.zero - INT4.zero)
        fours = INT4.pack("", fours[..., 0::2] | fours[..., 1::2] << 4)
        eights = INT8.pack("", eights)
        return torch.cat([fours, eights.reshape(-1, *fours.shape[1:])])


def join_integers(formats: tuple[Format | None, ...], outputs: tuple[int, ...]) -> Integers:
    """Return the format of a product that joins weights in INT4 and INT8.

    outputs: the number of each weight's outputs. Where those in int4 fill no panels, or are not the
    first, all become int8, which holds int4 exactly.
    """
    count = formats.index(INT8)
    fours = sum(outputs[:count])
    if not fours or fours % PANEL or INT4 in formats[count:]:
        return INT8
    return MixedIntegers(formats, fours, sum(outputs) - fours)


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
