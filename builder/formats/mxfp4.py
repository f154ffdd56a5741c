"""FP4 of which 32 columns share a power of two: mxfp4 of several projects, and our kernels' form.

DeepSeek-V4's routed experts are mxfp4, too: `weight` [out, in / 2] beside `scale` [out, in / 32].
"""

from collections.abc import Mapping
from functools import cache

from mtpbuild.builder.formats.format import (
    Entry,
    Format,
    FormatModule,
    Parts,
    ReadFormat,
    Settings,
    Shape,
)
from mtpbuild.builder.formats.integers import BLOCK, Integers
from mtpbuild.builder.formats.nvfp4 import unpack
from mtpbuild.builder.lazy_torch import Tensor, torch

POWERS = ("U8", "F8_E8M0")  # dtypes of scales that are powers of two
CODES = ("U8", "I8")  # dtypes of bytes that hold two codes
NOT_A_NUMBER = 255  # as an exponent


class Fp4(Integers):
    """mxfp4 as our kernels for CPUs read it: codes in int4's order, and a byte e for each block.

    W = number * 2 ** (e - 127). Kernels read powers of two as exponents, as fp16 lacks most of
    them: so all are exact, and a weight takes 4.25 bits.
    """

    def __init__(self) -> None:
        super().__init__(4, "powers")
        self.name = "mxfp4"

    def parts(self, shape: Shape) -> dict[str, Entry]:
        rows, blocks = shape[0], shape[1] // BLOCK
        values = Entry("U8", (rows, blocks, BLOCK // 2))
        return {"": values, "_scale": Entry("U8", (rows, blocks, 1))}

    def encode(self, weight: Tensor, amax: Tensor | None = None) -> Parts:
        raise NotImplementedError("mxfp4 is only read")

    def fault(self, parts: Mapping[str, Tensor]) -> str | None:
        return find_fault(parts["_scale"])

    def rows(self, suffix: str, part: Tensor, shape: Shape, group: int) -> Tensor:
        return part


FP4 = Fp4()


class Mxfp4(ReadFormat):
    """W = value * 2 ** (weight_scale - 127); a byte has the even column in its low nibble."""

    name, bits, block = "mxfp4", 4, BLOCK
    suffixes: tuple[str, ...] = ("", "_scale")

    def __init__(self, scales: str, codes: str = "U8") -> None:
        self._scales, self._codes = scales, codes

    @property
    def engine_format(self) -> Fp4:
        return FP4

    def to_engine_format(self, name: str, parts: Parts) -> Parts:
        codes, scales = (part.view(torch.uint8) for part in parts.values())
        return {"": codes.unflatten(1, (-1, BLOCK // 2)), "_scale": scales[..., None]}

    def fits(self, shape: Shape) -> bool:
        return shape[1] % BLOCK == 0

    def parts(self, shape: Shape) -> dict[str, Entry]:
        rows, columns = shape
        scale = Entry(self._scales, (rows, columns // BLOCK))
        return {"": Entry(self._codes, (rows, columns // 2)), "_scale": scale}

    def fault(self, parts: Mapping[str, Tensor]) -> str | None:
        return find_fault(parts["_scale"])

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        scales = as_floats(parts["_scale"])[..., None]
        values = unpack(parts[""].view(torch.uint8))
        return (values.unflatten(1, (-1, BLOCK)) * scales).flatten(1)


def find_fault(scales: Tensor) -> str | None:
    """Return what is wrong with scales that are powers of two, None if nothing is."""
    wrong = (scales.view(torch.uint8) == NOT_A_NUMBER).any()
    return "holds NaN or Inf" if wrong else None


def as_floats(scales: Tensor) -> Tensor:
    """Return scales in fp32; bytes are exponents, and 255 is not finite."""
    from mtpbuild.plugins.cpu.layout import raise_two

    if scales.is_floating_point() and scales.dtype != torch.float8_e8m0fnu:
        return scales.float()
    return raise_two(scales.view(torch.uint8))


_mxfp4 = cache(Mxfp4)


def find_format(name: str, entries: Mapping[str, Entry], settings: Settings) -> Format | None:
    """Find mxfp4; signed bytes are pairs of codes if they are 16 for each scale."""
    weight, scale = entries[name], entries.get(f"{name}_scale")
    if weight.dtype not in CODES or scale is None or scale.dtype not in POWERS:
        return None
    halves = scale.shape[-1:] and weight.shape[-1] * 2 == scale.shape[-1] * BLOCK
    return _mxfp4(scale.dtype, weight.dtype) if weight.dtype == "U8" or halves else None


MODULE = FormatModule(find=find_format, formats=(FP4,))
