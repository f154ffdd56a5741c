"""FP8 and int8 of compressed-tensors and ModelOpt: a scale per weight, row, group or block."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from mtpbuild.builder.formats.compressed_tensors import find_hinted_group
from mtpbuild.builder.formats.format import DTYPES, Entry, Format, FormatModule, ReadFormat, Shape
from mtpbuild.builder.formats.fp8 import BLOCK as SIDE
from mtpbuild.builder.formats.fp8 import FP8, Fp8
from mtpbuild.builder.formats.integers import BLOCK, INT8, MOVED, Integers
from mtpbuild.builder.formats.mxfp4 import POWERS, as_floats
from mtpbuild.builder.lazy_torch import Tensor

VALUES = {"F8_E4M3": "fp8", "I8": "int8"}


class ScaledValues(ReadFormat):
    """W = (value - weight_zero_point) * weight_scale, one of each for a block of the weight.

    value: e4m3 or int8. Scales are floats, or exponents e of 2 ** (e - 127). A block has `sides`
    rows and columns; 0 means all.
    """

    bits = 8

    def __init__(self, weight: Entry, scale: Entry, zero: Entry | None, sides: Shape) -> None:
        self._weight, self._scale, self._zero, self._sides = weight, scale, zero, sides
        self.block = sides[1] or weight.shape[1]
        self.suffixes = ("", "_scale", *(("_zero_point",) if zero else ()))
        self.name = self._name()

    def _name(self) -> str:
        rows, columns = self._sides
        if self._scale.dtype in POWERS:
            return f"mx{VALUES[self._weight.dtype]}"
        block = f"block of {rows} x {columns}"
        by = {(0, 0): "tensor", (1, 0): "row", (1, columns or 1): f"{columns} columns"}
        zeros = " with zero points" if self._zero else ""
        return f"{VALUES[self._weight.dtype]} by {by.get((rows, columns), block)}{zeros}"

    def parts(self, shape: Shape) -> dict[str, Entry]:
        both = zip(shape, self._sides, strict=True)
        grid = tuple(-(-size // (side or size)) for size, side in both)
        entries = {"": Entry(self._weight.dtype, shape)}
        for suffix, stored in (("_scale", self._scale), ("_zero_point", self._zero)):
            if stored is not None:  # a last axis of 1 may be left out
                entries[suffix] = Entry(stored.dtype, grid[: len(stored.shape)])
        return entries

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        values = parts[""].float()
        if self._zero is not None:
            values -= self._spread(parts["_zero_point"].float(), values.shape)
        return values.mul_(self._spread(as_floats(parts["_scale"]), values.shape))

    def _spread(self, scales: Tensor, shape: Shape) -> Tensor:
        """Expand scales of blocks to a weight's shape, or so that they broadcast to it."""
        while scales.dim() < 2:
            scales = scales[..., None]
        for axis, (side, size) in enumerate(zip(self._sides, shape, strict=True)):
            if side > 1:
                scales = scales.repeat_interleave(side, dim=axis).narrow(axis, 0, size)
        return scales

    def _spread_to_blocks(self, scales: Tensor, shape: Shape) -> Tensor:
        """Expand scales of groups of columns to [rows, blocks of our integers]."""
        rows, columns = shape
        group = self._sides[1] or columns
        wide = scales.reshape(-1, columns // group).repeat_interleave(group // BLOCK, dim=1)
        return wide.expand(rows, -1)

    @property
    def engine_format(self) -> Format:
        if self._scale.dtype in POWERS:
            return self
        if self._weight.dtype == "I8":
            rows, columns = self._sides
            whole = self._weight.shape[1] % BLOCK == columns % BLOCK == 0
            same = INT8 if self._zero is None else MOVED[8]
            return same if rows <= 1 and whole else self
        return FP8 if self._sides == (0, 0) else self

    def to_engine_format(self, name: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        values, scales = parts[""], parts["_scale"].float()
        if isinstance(kept := self.engine_format, Integers):
            zeros = parts.get("_zero_point")
            zeros = None if zeros is None else self._spread_to_blocks(zeros, values.shape)
            return kept.hold(name, values, self._spread_to_blocks(scales, values.shape), zeros)
        if self.engine_format is FP8:
            grid = FP8.parts(tuple(values.shape))["_scale_inv"].shape
            return {"": values, "_scale_inv": scales.reshape(1, 1).expand(grid).contiguous()}
        return parts


def find_format(
    name: str, entries: Mapping[str, Entry], settings: Mapping[str, Any]
) -> Format | None:
    weight, scale = entries[name], entries.get(f"{name}_scale")
    if weight.dtype not in VALUES or len(weight.shape) != 2 or scale is None:
        return None
    if scale.dtype not in (*DTYPES, *POWERS):
        return None
    zero = entries.get(f"{name}_zero_point")
    group = find_hinted_group(settings, name) if zero is None or len(scale.shape) == 2 else None
    if zero is None and weight.dtype == "I8" and group is not None and not group.symmetric:
        zero = Entry("I8", scale.shape)  # missing, which the check of the parts says
    return _make_scaled_format(
        weight, scale, zero, _find_sides(weight, scale, group.block if group else ())
    )


@cache
def _make_scaled_format(weight: Entry, scale: Entry, zero: Entry | None, sides: Shape) -> Format:
    if weight.dtype == "F8_E4M3" and sides == (SIDE, SIDE) and scale.dtype != "U8" and not zero:
        return Fp8(scale.dtype, "_scale")
    return ScaledValues(weight, scale, zero, sides)


def _find_sides(weight: Entry, scale: Entry, block: Shape) -> Shape:
    """Return the rows and columns that share a scale, by the shapes; 0 means all."""
    rows, columns = weight.shape
    count = (*scale.shape, 1, 1)
    if scale.shape in ((), (1,), (1, 1)):
        return (0, 0)
    if count[0] == rows and columns % count[1] == 0:
        return (1, columns // count[1] if count[1] > 1 else 0)
    return block if len(block) == 2 and all(block) else (SIDE, SIDE)


MODULE = FormatModule(find=find_format)
