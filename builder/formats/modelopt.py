"""ModelOpt's settings, its int4, and its weights whose inputs are scaled.

Its other layouts are those of `nvfp4.py` and `scaled.py`.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from mtpbuild.builder.formats.format import DTYPES, Entry, Format, FormatModule, ReadFormat, Shape
from mtpbuild.builder.formats.integers import BLOCK, INT4, GroupedIntegers, GroupedValues
from mtpbuild.builder.formats.nvfp4 import NVFP4
from mtpbuild.builder.lazy_torch import Tensor, torch

INPUTS = "_pre_quant_scale"
MIXED = "MIXED_PRECISION"
READ = {
    *("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "W4A16_AWQ", "FP8", "FP8_PER_CHANNEL_PER_TOKEN"),
    *("MXFP8", "W8A16"),
}


class RowPairs(GroupedIntegers):
    """ModelOpt's int4: W = value * weight_scale, one scale for some columns of a row.

    A byte has the values of two rows, the even row's in its low nibble, in two's complement.
    """

    bits = 4
    suffixes: tuple[str, ...] = ("", "_scale")

    def __init__(self, columns: int, scales: str) -> None:
        self.name = f"int4 by {columns} columns"
        self.block = columns
        self.integers = None if columns % BLOCK else INT4
        self._scales = scales

    def fits(self, shape: Shape) -> bool:
        return shape[0] % 2 == 0 and shape[1] % self.block == 0

    def parts(self, shape: Shape) -> dict[str, Entry]:
        rows, columns = shape
        scale = Entry(self._scales, (rows, columns // self.block))
        return {"": Entry("U8", (rows // 2, columns)), "_scale": scale}

    def unpack(self, parts: Mapping[str, Tensor]) -> GroupedValues:
        groups = torch.arange(parts[""].shape[1]) // self.block
        return GroupedValues(unpack_pairs(parts[""]), parts["_scale"], None, groups)


def unpack_pairs(packed: Tensor) -> Tensor:
    """Split bytes [N / 2, K] into the values of two rows each."""
    pairs = packed.view(torch.int8)
    return torch.stack([pairs << 4 >> 4, pairs >> 4], dim=1).flatten(0, 1)


class ScaledInputs(ReadFormat):
    """A format whose weight's inputs are multiplied first: W = W' * pre_quant_scale, by column."""

    def __init__(self, of: Format, scales: str) -> None:
        self.name, self.bits, self.block = f"{of.name} with scaled inputs", of.bits, of.block
        self.suffixes = (*of.suffixes, INPUTS)
        self._of, self._scales = of, scales

    def fits(self, shape: Shape) -> bool:
        return self._of.fits(shape)

    def parts(self, shape: Shape) -> dict[str, Entry]:
        return self._of.parts(shape) | {INPUTS: Entry(self._scales, shape[1:])}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        return self._of.decode(parts).mul_(parts[INPUTS].float())


def find_format(
    name: str, entries: Mapping[str, Entry], settings: Mapping[str, Any]
) -> Format | None:
    weight, scale = entries[name], entries.get(f"{name}_scale")
    if weight.dtype != "U8" or scale is None or len(weight.shape) != 2:
        return None
    inputs = entries.get(f"{name}{INPUTS}")
    if scale.dtype == "F8_E4M3" and inputs is not None:
        format: Format = NVFP4
    elif scale.dtype in DTYPES and len(scale.shape) == 2 and scale.shape[1]:
        format = _row_pairs(weight.shape[1] // scale.shape[1], scale.dtype)
    else:
        return None
    return format if inputs is None else _scaled_inputs(format, inputs.dtype)


_row_pairs, _scaled_inputs = cache(RowPairs), cache(ScaledInputs)


def find_unread_algorithm(settings: Mapping[str, Any]) -> str | None:
    """Return the first of ModelOpt's settings that is not read; None if all are."""
    parts, layers = [settings], settings.get("quantized_layers")
    if settings.get("quant_algo") == MIXED and isinstance(layers, Mapping):
        parts = [part for part in layers.values() if isinstance(part, Mapping)]
    algorithms = (str(part.get("quant_algo")) for part in parts)
    unknown = next((name for name in algorithms if name not in READ), None)
    return unknown and f"modelopt {unknown}"


def name_algorithm(settings: Mapping[str, Any], module: str) -> str:
    """Return a recipe's name for the layout of a module; a list may name a part that it is in."""
    said, layers = settings, settings.get("quantized_layers")
    if settings.get("quant_algo") == MIXED and isinstance(layers, Mapping):
        while module and module not in layers:
            module = module.rpartition(".")[0]
        said = each if isinstance(each := layers.get(module), Mapping) else {}
    algorithm = str(said.get("quant_algo"))
    names = {"NVFP4": "nvfp4", "FP8": "fp8", "W8": "int8", "W4": "int4"}
    return next((name for sign, name in names.items() if sign in algorithm), "bf16")


MODULE = FormatModule(
    find=find_format,
    names={".pre_quant_scale": f".weight{INPUTS}"},
    methods={"modelopt": find_unread_algorithm},
    reads="ModelOpt's NVFP4, FP8, MXFP8 and int4",
)
