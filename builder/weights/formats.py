"""Number formats of weights: how each one stores values, and how a checkpoint's format is found."""

from __future__ import annotations  # Tensor is imported for types alone

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, prod
from typing import TYPE_CHECKING

from mtpbuild.builder.late_torch import torch
from mtpbuild.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
FP8_BLOCK = 128
BLOCK = 32  # columns of int8 and int4 that share a scale
GROUP = 16  # columns of NVFP4 that share a scale
LARGEST = 448.0  # largest e4m3 value
LEAST = 2.0**-9  # smallest positive e4m3 value
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1 codes 0..7; bit 3 is the sign
SIZES = {"F8_E4M3": 1, "U8": 1, "BF16": 2, "F16": 2, "F32": 4}  # bytes per element
NAMES = {  # torch dtype -> its name in safetensors
    "float8_e4m3fn": "F8_E4M3",
    "uint8": "U8",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
}
TYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class Entry:
    """An entry of a safetensors header: a tensor's dtype, by its name there, and its shape."""

    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        return SIZES[self.dtype] * prod(self.shape)

    @property
    def type(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, TYPES[self.dtype])
        return dtype


def entry_of(tensor: Tensor) -> Entry:
    return Entry(NAMES[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape))


class Format(ABC):
    """A number format: it stores a weight [out, in] as one or more tensors, its parts.

    Each part is named `X.weight` plus one of `suffixes`.
    """

    name: str
    suffixes: tuple[str, ...]  # the first part, "", holds the values
    needs_amax = False  # whether `encode` needs the largest magnitude

    @property
    def kept(self) -> Format:
        """The format in which engines keep such weights."""
        return self

    def keep(self, name: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts of weight `name` in the format `kept`."""
        return parts

    @property
    def most(self) -> float:
        """The largest magnitude that the format can represent."""
        return inf

    def fits(self, shape: Shape) -> bool:
        """Return whether a weight of this shape splits into the format's blocks."""
        return True

    @abstractmethod
    def parts(self, shape: Shape) -> dict[str, Entry]:
        """Return the tensors that store a weight of this shape, by suffix."""

    @abstractmethod
    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the weight in fp32: values times scales, rounded once."""

    @abstractmethod
    def encode(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        """Encode an fp32 weight, or some of its rows that are whole rows of blocks.

        amax (0-dim): the largest magnitude of the weight, or of all weights that share its second
        scale.
        """


class Fp8(Format):
    """DeepSeek's FP8: e4m3 values, and one fp32 scale for each block of 128 x 128.

    W[n, k] = value[n, k] * weight_scale_inv[n // 128, k // 128]; blocks at the edges may be
    smaller.
    """

    name = "fp8"
    suffixes: tuple[str, ...] = ("", "_scale_inv")

    def parts(self, shape: Shape) -> dict[str, Entry]:
        scales = tuple(-(-size // FP8_BLOCK) for size in shape)
        return {"": Entry("F8_E4M3", shape), "_scale_inv": Entry("F32", scales)}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        values = parts[""].float()
        return values.mul_(spread(parts["_scale_inv"], values.shape))

    def encode(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        rows, columns = (-size % FP8_BLOCK for size in weight.shape)
        padded = torch.nn.functional.pad(weight, (0, columns, 0, rows))
        blocks = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
        largest = blocks.abs().amax(dim=(1, 3))
        scales = torch.where(largest > 0, largest / LARGEST, 1.0)
        values = (weight / spread(scales, weight.shape)).to(torch.float8_e4m3fn)
        return {"": values, "_scale_inv": scales}


def spread(scales: Tensor, shape: Shape, times: int = FP8_BLOCK) -> Tensor:
    """Expand scales of blocks to `shape`: each is repeated for 128 rows and `times` columns."""
    rows, columns = shape
    wide = scales.repeat_interleave(times, dim=1)[:, :columns]
    return wide.repeat_interleave(FP8_BLOCK, dim=0)[:rows]


class Nvfp4(Format):
    """ModelOpt's NVFP4: e2m1 values, an e4m3 scale per 16 columns, an fp32 scale per weight.

    W = value * weight_scale * weight_scale_2; a byte has two values, the even column in its low
    nibble.
    """

    name = "nvfp4"
    suffixes: tuple[str, ...] = ("", "_scale", "_scale_2")
    needs_amax = True

    def fits(self, shape: Shape) -> bool:
        return shape[1] % GROUP == 0

    def parts(self, shape: Shape) -> dict[str, Entry]:
        rows, columns = shape
        return {
            "": Entry("U8", (rows, columns // 2)),
            "_scale": Entry("F8_E4M3", (rows, columns // GROUP)),
            "_scale_2": Entry("F32", ()),
        }

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        values = unpack(parts[""]).unflatten(1, (-1, GROUP))
        scaled = values * parts["_scale"].float()[..., None]  # exact: 2 times 4 bits
        return (scaled * parts["_scale_2"]).flatten(1)

    def encode(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        assert amax is not None
        second = torch.where(amax > 0, amax / (MAGNITUDES[-1] * LARGEST), 1.0)
        groups = weight.unflatten(1, (-1, GROUP))
        largest = groups.abs().amax(-1)
        scales = (largest / (MAGNITUDES[-1] * second)).clamp(LEAST, LARGEST)
        scales = torch.where(largest > 0, scales, 1.0).to(torch.float8_e4m3fn)
        values = (groups / (scales.float() * second)[..., None]).flatten(1)
        return {"": pack(values), "_scale": scales, "_scale_2": second}


def unpack(packed: Tensor) -> Tensor:
    """Decode uint8 codes [N, K/2] to fp32 values [N, K]."""
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)])
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1)
    return values[codes.int()].flatten(1)


def pack(values: Tensor) -> Tensor:
    """Round fp32 values [N, K] to the nearest codes, ties to even codes: uint8 [N, K/2]."""
    steps = torch.tensor(MAGNITUDES)
    middles = (steps[1:] + steps[:-1]) / 2
    size = values.abs()
    codes = torch.bucketize(size, middles)  # a tie goes to the lower code, even or odd
    codes += torch.isin(size, middles[1::2])
    codes += 8 * values.signbit()
    pairs = codes.to(torch.uint8).unflatten(1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


class Integers(Format):
    """int8 or int4 with one scale per block of 32 columns.

    W = (value - 2 ** (bits - 1)) * weight_scale; in int4 the low nibble comes first. Scales are
    fp16, as in GGUF's Q4_0 and Q8_0, so int4 takes 4.5 bits a weight. A scale that is subnormal in
    fp16 is rounded away from zero, so that no value is clipped. Our older checkpoints have fp32
    scales, which engines do not keep.
    """

    suffixes: tuple[str, ...] = ("", "_scale")

    def __init__(self, bits: int, scales: str = "F16") -> None:
        self.name, self.bits, self.zero, self._scales = f"int{bits}", bits, 1 << bits - 1, scales

    @property
    def kept(self) -> Integers:
        return {4: INT4, 8: INT8}[self.bits]

    def keep(self, name: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Cast fp32 scales to fp16; if one is not exact there, quantise the weight anew."""
        if self is self.kept:
            return parts
        scales = parts["_scale"].half()
        if scales.is_meta or torch.equal(scales.float(), parts["_scale"]):
            return parts | {"_scale": scales}
        weight = self.decode(parts)
        refuse_too_large(self.kept, name, weight)
        return self.kept.encode(weight)

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
        values = values.to(torch.uint8)
        if self.bits == 4:
            values = values[..., 0::2] | values[..., 1::2] << 4
        return {"": values, "_scale": scales.squeeze(-1)}

    def _rounded(self, scales: Tensor) -> Tensor:
        """Round scales to the nearest value of their type; round subnormal ones away from zero."""
        kind = torch.finfo(self.scales)
        step = kind.smallest_normal * kind.eps
        away = (scales.abs() / step).ceil().mul(step).copysign(scales)
        return torch.where(scales.abs() < kind.smallest_normal, away, scales).to(self.scales)


FP8, NVFP4, INT8, INT4 = Fp8(), Nvfp4(), Integers(8), Integers(4)
WIDE = {4: Integers(4, "F32"), 8: Integers(8, "F32")}  # with scales in fp32
FORMATS: dict[str, Format] = {f.name: f for f in (FP8, NVFP4, INT8, INT4)}
DTYPES = ("BF16", "F16", "F32")  # of weights that are not quantised
SUPPORTED = f"{', '.join(DTYPES)}, FP8 with its weight_scale_inv, NVFP4 or int with weight_scale"


FINE = 2.0**-21  # rounding to fp16 changes a smaller scale by up to an eighth, or more


def coarse_blocks(scales: Tensor) -> int:
    """Count the blocks of integers that lose accuracy because their scale is too small for fp16."""
    if scales.dtype != torch.float16:
        return 0
    return int(((scales != 0) & (scales.abs() < FINE)).sum())


def coarse_note(blocks: int) -> str:
    return (
        f"{blocks:,} blocks of {BLOCK} weights lose accuracy: they are so small that rounding "
        "their scale to fp16 changes it by up to an eighth, or more"
    )


def refuse_too_large(format: Format, name: str, weight: Tensor) -> None:
    """Raise CheckpointError if a weight has values that are too large for the format's scales."""
    if weight.is_meta or not weight.numel():
        return  # a dry run knows no values
    largest = weight.abs().max().item()
    if largest > format.most:
        raise CheckpointError(
            f"{name} holds {largest:,.0f}, but {format.name} ends at {format.most:,.0f}: "
            "keep this weight in floats, or scale it down"
        )


def stored_format(name: str, entries: Mapping[str, Entry]) -> Format | None:
    """Return the format of weight `name`; None if it is not quantised, or in an unknown format.

    The dtype of its scale decides, as lists of excluded modules are not reliable.
    """
    weight, scale = entries[name], entries.get(f"{name}_scale")
    if weight.dtype == "F8_E4M3" and f"{name}_scale_inv" in entries:
        return FP8
    if weight.dtype != "U8" or scale is None:
        return None
    if scale.dtype == "F8_E4M3":
        return NVFP4
    format = INT4 if weight.shape[-1] == BLOCK // 2 else INT8
    return WIDE[format.bits] if scale.dtype == "F32" else format
