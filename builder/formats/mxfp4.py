"""MXFP4: e2m1 values, and a power of two for each 32 columns."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from mtpbuild.builder.formats.format import Entry, Format, ReadFormat, Shape
from mtpbuild.builder.formats.nvfp4 import unpack
from mtpbuild.builder.formats.scaled import POWERS, as_floats
from mtpbuild.builder.lazy_torch import Tensor

GROUP = 32


class Mxfp4(ReadFormat):
    """W = value * 2 ** (weight_scale - 127); a byte has the even column in its low nibble."""

    name, bits, block = "mxfp4", 4, GROUP
    suffixes: tuple[str, ...] = ("", "_scale")

    def __init__(self, scales: str) -> None:
        self._scales = scales

    def fits(self, shape: Shape) -> bool:
        return shape[1] % GROUP == 0

    def parts(self, shape: Shape) -> dict[str, Entry]:
        rows, columns = shape
        scale = Entry(self._scales, (rows, columns // GROUP))
        return {"": Entry("U8", (rows, columns // 2)), "_scale": scale}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        scales = as_floats(parts["_scale"])[..., None]
        return (unpack(parts[""]).unflatten(1, (-1, GROUP)) * scales).flatten(1)


def find_format(
    name: str, entries: Mapping[str, Entry], settings: Mapping[str, Any]
) -> Format | None:
    weight, scale = entries[name], entries.get(f"{name}_scale")
    if weight.dtype != "U8" or scale is None or scale.dtype not in POWERS:
        return None
    return _mxfp4(scale.dtype)


_mxfp4 = cache(Mxfp4)
