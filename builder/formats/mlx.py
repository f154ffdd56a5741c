"""MLX's formats: integers with a scale and a bias for each group, mxfp4, mxfp8 and nvfp4."""

from collections.abc import Mapping
from functools import cache
from itertools import chain
from typing import Any

from mtpbuild.builder.formats.compressed_tensors import dense, unpack_stream
from mtpbuild.builder.formats.format import DTYPES, Entry, Format, FormatModule, ReadFormat, Shape
from mtpbuild.builder.formats.fp8 import LARGEST
from mtpbuild.builder.formats.integers import ShiftedIntegers
from mtpbuild.builder.formats.mxfp4 import Mxfp4
from mtpbuild.builder.formats.nvfp4 import MAGNITUDES, NVFP4, unpack
from mtpbuild.builder.formats.scaled import ScaledValues
from mtpbuild.builder.lazy_torch import Tensor, torch

METHOD = "mlx"  # MLX's settings name no method
WORD = 32  # bits
WIDTHS = (2, 3, 4, 5, 6, 8)
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
SCALES, BIASES, GLOBAL = "_scales", "_biases", "_global_scale"


class MlxIntegers(ShiftedIntegers):
    """W = code * scales + biases, both of a group; codes are a row's bits, the lowest first."""

    suffixes: tuple[str, ...] = ("", SCALES, BIASES)

    def __init__(self, bits: int, group: int, scales: str) -> None:
        self.name = f"mlx int{bits}"
        self.bits = bits
        self.block = group
        self._scales = scales

    def fits(self, shape: Shape) -> bool:
        return shape[1] % self.block == 0 and shape[1] * self.bits % WORD == 0

    def parts(self, shape: Shape) -> dict[str, Entry]:
        rows, columns = shape
        group = Entry(self._scales, (rows, columns // self.block))
        words = Entry("U32", (rows, dense(columns, self.bits)))
        return {"": words, SCALES: group, BIASES: group}

    def unpack(self, values: Tensor) -> Tensor:
        return unpack_stream(values, self.bits, values.shape[1] * WORD // self.bits, dense)


class MlxFloats(ReadFormat):
    """Another format's values and scales, in words and bytes; nvfp4 may have a global scale.

    The global scale is the largest magnitude that is stored: 448 times 6. It multiplies the scales,
    which rounds; engines hold both, so the last bit of a weight may differ.
    """

    def __init__(self, format: Format, scaled: bool = False) -> None:
        self.name = f"mlx {format.name}"
        self.bits = format.bits
        self.block = format.block
        self._own = format
        self.suffixes = ("", SCALES, *((GLOBAL,) * scaled))

    @property
    def engine_format(self) -> Format:
        return self._own.engine_format

    def fits(self, shape: Shape) -> bool:
        return shape[1] % self.block == 0

    def parts(self, shape: Shape) -> dict[str, Entry]:
        rows, columns = shape
        parts = {
            "": Entry("U32", (rows, dense(columns, self.bits))),
            SCALES: Entry("U8", (rows, columns // self.block)),
            GLOBAL: Entry("F32", ()),
        }
        return {suffix: parts[suffix] for suffix in self.suffixes}

    def to_engine_format(self, name: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._own.to_engine_format(name, self._as_own(parts))

    def fault(self, parts: Mapping[str, Tensor]) -> str | None:
        return self._own.fault(self._as_own(parts))

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        published = self._as_own(parts)
        if GLOBAL not in parts:
            return self._own.decode(published)
        scales = published["_scale"].float() * published["_scale_2"]
        return (unpack(published[""]).unflatten(1, (-1, self.block)) * scales[..., None]).flatten(1)

    def _as_own(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values, scales = parts[""].view(torch.uint8), parts[SCALES]
        if self.bits == 8:
            values = values.view(torch.float8_e4m3fn)
        if self._own is not NVFP4:
            return {"": values, "_scale": scales}
        second = scales.new_ones((), dtype=torch.float32)
        if GLOBAL in parts:
            second = parts[GLOBAL] / (MAGNITUDES[-1] * LARGEST)
        return {"": values, "_scale": scales.view(torch.float8_e4m3fn), "_scale_2": second}


_MXFP4 = Mxfp4("U8")
_MXFP8 = ScaledValues(Entry("F8_E4M3", (1, 32)), Entry("U8", (1, 1)), None, (1, 32))
_integers, _floats = cache(MlxIntegers), cache(MlxFloats)  # formats are compared by `is`


def find_format(
    name: str, entries: Mapping[str, Entry], settings: Mapping[str, Any]
) -> Format | None:
    """Find a format by the words for a group; settings tell integers of equally many apart."""
    weight, scales = entries[name], entries.get(name + SCALES)
    if weight.dtype != "U32" or len(weight.shape) != 2:
        return None
    if scales is None:
        scales = Entry("F16", (weight.shape[0], 0))  # missing, which the check of the parts says
    words = weight.shape[1] / (scales.shape[-1] or 1) if scales.shape else 0.0
    if scales.dtype in DTYPES:
        bits, group = _choose(name, settings, words)
        return _integers(bits, group, scales.dtype)
    format = NVFP4 if words == 2 else _MXFP4 if words == 4 else _MXFP8
    return _floats(format, format is NVFP4 and name + GLOBAL in entries)


def _choose(name: str, settings: Mapping[str, Any], words: float) -> tuple[int, int]:
    """Return bits and group: those said of the module, else the first that the words agree with."""
    said = chain(map(settings.get, list_paths(name)), [settings], settings.values())
    geometries = (each for each in map(_read_geometry, said) if each is not None)
    first = next(geometries, (4, 64))
    agreeing = (each for each in chain([first], geometries) if each[0] * each[1] == words * WORD)
    return next(agreeing, first)


def _read_geometry(rule: Any) -> tuple[int, int] | None:
    """Return the bits and the group that settings say; None if they don't."""
    if not isinstance(rule, Mapping):
        return None
    bits, group = rule.get("bits"), rule.get("group_size")
    return (bits, group) if bits in WIDTHS and isinstance(group, int) and group > 0 else None


@cache
def list_paths(name: str) -> tuple[str, ...]:
    """Return the names that MLX may have for a weight's module."""
    module, dot, projection = name.removesuffix(".weight").rpartition(".")
    stack, _, number = module.rpartition(".")
    if number.isdigit() and stack.endswith(".experts"):
        layer = stack.removesuffix(".experts")
        module = f"{layer}.switch_mlp" if layer.endswith(".mlp") else f"{stack}.switch_glu"
    path = module + dot + projection
    return path, f"language_model.{path}", path.removeprefix("mtp.")


def find_unread_mlx(settings: Mapping[str, Any]) -> str | None:
    """Return the first of MLX's settings that is not read; None if all are."""
    rules = (rule for rule in settings.values() if isinstance(rule, Mapping))
    for rule in (settings, *rules):
        if (mode := rule.get("mode", "affine")) not in MODES:
            return f"mlx {mode}"
        if (bits := rule.get("bits", 4)) not in WIDTHS:
            return f"mlx with {bits} bits"
    return None


MODULE = FormatModule(
    find=find_format,
    names={".biases": f".weight{BIASES}", ".global_scale": f".weight{GLOBAL}"},
    methods={METHOD: find_unread_mlx},
    reads="MLX (affine, mxfp4, mxfp8, nvfp4)",
)
