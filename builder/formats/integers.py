"""Integers in blocks, as our kernels for CPUs read them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from mtpbuild.builder.formats.format import (
    Entry,
    Format,
    FormatModule,
    Parts,
    ReadFormat,
    Settings,
    Shape,
    refuse_out_of_range,
)
from mtpbuild.builder.lazy_torch import Tensor, torch
from mtpbuild.runtime.errors import CheckpointError

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
    are subnormal in fp16 are rounded away from zero.

    offsets: what a block has after its scale, in engines alone: "zeros", a byte that is subtracted
    from its values besides, or "minima", in fp16, for W = value * weight_scale + minimum; or
    "powers", which are in place of its scale (`Fp4`).
    """

    block = BLOCK
    suffixes: tuple[str, ...] = ("", "_scale")
    packs = True

    def __init__(self, bits: int, offsets: str | None = None) -> None:
        self.name = f"int{bits}"
        self.bits = bits
        self.zero = 1 << bits - 1
        self.offsets = offsets
        self.looks_up = offsets is None
        self.joined_bytes = BLOCK * bits // 8  # of a block's values when weights are joined

    def hold(self, name: str, values: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Parts:
        """Return the parts of (values - zeros) * scales, as they are.

        values: [N, K], signed; scales and zeros: [N, K / 32]. Where fp16 does not have the scales,
        they are rounded, or the weight is quantised again, whichever is closer.
        """
        scales = scales.float()
        rounded = self._round_scales(scales)
        zeros = None if zeros is None else zeros.to(torch.int8)
        held = self.collect((values.short() + self.zero).byte(), rounded, zeros)
        if torch.equal(rounded.float(), scales):
            return held
        whole = values.unflatten(1, (-1, BLOCK)).float()
        if zeros is not None:
            whole -= zeros.float()[..., None]
        weight = (whole * scales[..., None]).flatten(1)
        refuse_out_of_range(self, name, weight)
        both = held, self.encode(weight)
        return min(both, key=lambda parts: (self.decode(parts) - weight).square().sum().item())

    def shift(self, codes: Tensor, scales: Tensor, minima: Tensor) -> Parts:
        """Return the parts of codes * scales + minima, both rounded to fp16 where it lacks them.

        codes: uint8 [N, K]; scales and minima: [N, K / 32]. Numbers beyond fp16 become its largest.
        """
        info = torch.finfo(torch.float16)
        halves = (each.float().clamp(info.min, info.max).half() for each in (scales, minima))
        return self.collect(codes, *halves)

    def collect(self, codes: Tensor, scales: Tensor, offsets: Tensor | None = None) -> Parts:
        """Return the parts of codes [N, K], and of scales and offsets [N, K / 32]."""
        values = self._pack_nibbles(codes.unflatten(1, (-1, BLOCK)))
        return {"": values.contiguous(), "_scale": self._add_offsets(scales, offsets)}

    def _pack_nibbles(self, codes: Tensor) -> Tensor:
        return codes[..., 0::2] | codes[..., 1::2] << 4 if self.bits == 4 else codes

    @property
    def most(self) -> float:
        largest = torch.finfo(torch.float16).max
        # A minimum is a scale times -zero, and int4's may be a scale for -6.5.
        return largest * self.zero if self.offsets != "minima" else largest * 6.5 / 8

    def sum_coarse(self, weight: Tensor) -> Tensor:
        tops = weight.reshape(-1, BLOCK).abs().amax(-1).double()
        squares = tops.square()
        return torch.stack([squares[tops < FINEST * self.zero].sum(), squares.sum()])

    def fits(self, shape: Shape) -> bool:
        return shape[1] % BLOCK == 0

    def parts(self, shape: Shape) -> dict[str, Entry]:
        rows, blocks = shape[0], shape[1] // BLOCK
        packed = Entry("U8", (rows, blocks, BLOCK * self.bits // 8))
        scale = Entry("F16", (rows, blocks))
        if self.offsets:
            scale = Entry("U8", (rows, blocks, 3 if self.offsets == "zeros" else 4))
        return {"": packed, "_scale": scale}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        from mtpbuild.plugins.cpu.layout import dequantise

        return dequantise(parts[""], parts["_scale"], self.bits)

    def encode(self, weight: Tensor, amax: Tensor | None = None) -> Parts:
        codes, scales = list[Tensor](), list[Tensor]()
        for blocks in weight.reshape(-1, BLOCK).split(GROUP):
            scales.append(self.fit_scales(blocks))
            codes.append(self.codes(blocks, scales[-1]))
        rows = len(weight)
        return self.collect(torch.cat(codes).view(rows, -1), torch.cat(scales).view(rows, -1))

    def _add_offsets(self, scales: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Return scales with offsets if the format has them; None: those of its usual zero."""
        if self.offsets is None:
            return scales
        from mtpbuild.plugins.cpu.layout import with_offsets

        if offsets is None and self.offsets == "zeros":
            offsets = torch.zeros_like(scales, dtype=torch.int8)
        if offsets is None:
            offsets = (scales.float() * -self.zero).half()
            if offsets.isinf().any():
                raise CheckpointError("is too large for minima in fp16, which it is joined with")
        return with_offsets(scales, offsets)

    def fit_scales(self, blocks: Tensor) -> Tensor:
        """Return the scales [n, 1] of blocks [n, 32]."""
        extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        scales = self._round_scales(extreme * self._fit_scales(blocks, extreme))
        return torch.where(scales != 0, scales, 1.0)

    def codes(self, values: Tensor, scales: Tensor) -> Tensor:
        """Return the nearest codes of values, in uint8; scales: of the same number of axes."""
        codes = (values / scales.float()).round_().clamp_(-self.zero, self.zero - 1)
        return codes.add_(self.zero).to(torch.uint8)

    def _fit_scales(self, blocks: Tensor, extreme: Tensor) -> Tensor | float:
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
        """Return a part as it is, but int4 values among int8 ones as int8 of the same scale.

        Scales without offsets get them, if the joined weight has some.
        """
        if suffix == "_scale" and part.dtype == torch.float16:
            return self._add_offsets(part)
        if suffix != "" or part.shape[-1] >= self.joined_bytes:
            return part
        return torch.stack([part & 0xF, part >> 4], dim=-1).flatten(-2) + (INT8.zero - INT4.zero)

    def pack(self, suffix: str, part: Tensor) -> Tensor:
        from mtpbuild.plugins.cpu.layout import pack_scales, pack_values

        return pack_values(part) if suffix == "" else pack_scales(part)

    def _round_scales(self, scales: Tensor) -> Tensor:
        """Round scales to the nearest value of their type; round subnormal ones away from zero."""
        info = torch.finfo(torch.float16)
        scales = scales.clamp(info.min, info.max)
        step = info.smallest_normal * info.eps  # between subnormal numbers
        away = (scales.abs() / step).ceil().mul(step).copysign(scales)
        return torch.where(scales.abs() < info.smallest_normal, away, scales).half()


def _sum_rows(x: Tensor) -> Tensor:
    """Sum x [2^n, ..] over its first axis, halves first."""
    while len(x) > 1:
        half = len(x) // 2
        x = x[:half] + x[half:]
    return x[0]


INT8 = Integers(8)
INT4 = Integers(4)
USUAL = {4: INT4, 8: INT8}  # by bits
MOVED = {bits: Integers(bits, "zeros") for bits in USUAL}  # with zero points
SHIFTED = {bits: Integers(bits, "minima") for bits in USUAL}  # with a minimum for each block


def find_format(name: str, entries: Mapping[str, Entry], settings: Settings) -> Format | None:
    weight = entries[name]
    if weight.dtype != "U8" or len(weight.shape) != 3 or f"{name}_scale" not in entries:
        return None
    return INT4 if weight.shape[-1] == BLOCK // 2 else INT8


MODULE = FormatModule(
    find=find_format,
    formats=(INT8, INT4),
    methods={"mtpbuild": lambda settings: None},
    reads="what `mtpbuild quantize` writes",
)


class MixedIntegers(Integers):
    """A joined product whose first outputs are int4 and the others int8, in one packed weight.

    An int8 panel takes the place of two int4 ones. formats: of each joined weight.
    """

    def __init__(self, formats: tuple[Integers, ...], fours: int, eights: int) -> None:
        super().__init__(4, offsets=next(filter(None, (f.offsets for f in formats)), None))
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


def join_integers(formats: tuple[Integers, ...], outputs: tuple[int, ...]) -> Integers:
    """Return the format of a product that joins weights in different integers.

    outputs: the number of each weight's outputs. Where those in int4 fill no panels, or are not the
    first, all become int8, which holds int4 exactly, but not its minima.
    """
    bits, offsets = [format.bits for format in formats], {format.offsets for format in formats}
    if {"zeros", "minima"} <= offsets or "powers" in offsets:
        return INT8  # to which these are rounded
    same = SHIFTED if "minima" in offsets else MOVED if "zeros" in offsets else USUAL
    if len({*bits}) == 1:
        return same[bits[0]]
    count = bits.index(8)
    fours = sum(outputs[:count])
    if not fours or fours % PANEL or 4 in bits[count:]:
        return INT8 if "minima" in offsets else same[8]
    return MixedIntegers(formats, fours, sum(outputs) - fours)


class GroupedValues(NamedTuple):
    """The numbers of a weight whose columns share scales in groups."""

    values: Tensor  # integers [out, in]
    scales: Tensor  # [out, groups]
    zeros: Tensor | None  # [out, groups]
    groups: Tensor  # of each column [in]


class GroupedIntegers(ReadFormat):
    """Integers of other projects, whose columns share scales in groups.

    W[n, k] = (value[n, k] - zero[n, g]) * scale[n, g], with g = groups[k].

    integers: the engine's format that has the same values, None if there is none.
    """

    integers: Integers | None

    @property
    def engine_format(self) -> Format:
        return self.integers or self

    @abstractmethod
    def unpack(self, parts: Mapping[str, Tensor]) -> GroupedValues:
        """Return the weight's numbers."""

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        values, scales, zeros, groups = self.unpack(parts)
        whole = values if zeros is None else values - zeros[:, groups]
        return whole.float().mul_(scales.float()[:, groups])

    def to_engine_format(self, name: str, parts: Parts) -> Parts:
        if self.integers is None:
            return parts
        values, scales, zeros, groups = self.unpack(parts)
        blocks = groups[::BLOCK]
        zeros = None if zeros is None else zeros[:, blocks]
        return self.integers.hold(name, values, scales[:, blocks], zeros)


class ShiftedIntegers(ReadFormat):
    """Integers of other projects with a scale and a minimum, the last two parts, for each group.

    W = value * scale + minimum. Integers stay in engines if groups are whole blocks of ours.
    """

    @property
    def engine_format(self) -> Format:
        return self if self.block % BLOCK else SHIFTED[4 if self.bits <= 4 else 8]

    @abstractmethod
    def unpack(self, values: Tensor) -> Tensor:
        """Return the codes [N, K] in the weight's first part."""

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        codes = self.unpack(parts[""]).unflatten(1, (-1, self.block))
        scales, minima = (parts[suffix].float()[..., None] for suffix in self.suffixes[1:])
        return codes.float().mul_(scales).add_(minima).flatten(1)

    def to_engine_format(self, name: str, parts: Parts) -> Parts:
        if not isinstance(kept := self.engine_format, Integers):
            return parts
        times = self.block // BLOCK
        halves = (parts[suffix].repeat_interleave(times, dim=1) for suffix in self.suffixes[1:])
        return kept.shift(self.unpack(parts[""]), *halves)


class BlockMinima(ShiftedIntegers):
    """int4 in blocks of 32 columns, with scales and minima in fp32."""

    bits, block = 4, BLOCK
    suffixes: tuple[str, ...] = ("", "_scale", "_minimum")

    def __init__(self, name: str) -> None:
        self.name = name

    def parts(self, shape: Shape) -> dict[str, Entry]:
        rows, blocks = shape[0], shape[1] // BLOCK
        each = Entry("F32", (rows, blocks))
        return {"": Entry("U8", (rows, blocks, BLOCK // 2)), "_scale": each, "_minimum": each}

    def unpack(self, values: Tensor) -> Tensor:
        return torch.stack([values & 0xF, values >> 4], dim=-1).flatten(1)


def count_coarse_blocks(scales: Tensor) -> int:
    """Count the blocks of integers that lose accuracy because their scale is too small for fp16."""
    if scales.dtype != torch.float16 or (scales.ndim > 2 and scales.shape[-1] < PANEL):
        return 0
    if scales.ndim > 2:
        scales = scales[..., :PANEL]  # without offsets
    return int(((scales != 0) & (scales.abs() < FINEST)).sum())


def describe_coarse_blocks(blocks: int) -> str:
    return (
        f"{blocks:,} blocks of {BLOCK} weights lose accuracy: they are so small that rounding "
        "their scale to fp16 changes it by up to an eighth, or more"
    )
