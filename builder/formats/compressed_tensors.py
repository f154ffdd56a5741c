"""compressed-tensors: its settings, and integers that are packed into 32-bit words.

Other layouts of it are those of `scaled.py` and `nvfp4.py`. Which tensors a weight has
decides over targets and lists of ignored modules; settings tell what tensors don't show.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from mtpbuild.builder.formats.format import Entry, Format, FormatModule, Settings, Shape
from mtpbuild.builder.formats.integers import (
    BLOCK,
    MOVED,
    USUAL,
    GroupedIntegers,
    GroupedValues,
)
from mtpbuild.builder.lazy_torch import Tensor, torch

METHOD = "compressed-tensors"
READ = {
    "dense", "mixed-precision", "pack-quantized", "int-quantized", "float-quantized",
    "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
}  # fmt: skip
WORD = 32  # bits
ORDERS = ("group", True)  # values of actorder with which columns don't lie group by group


@dataclass(frozen=True)
class Group:
    """What a group of modules has as weights, by the settings."""

    targets: tuple[str, ...]
    bits: int = 4
    columns: int = 0  # that share a scale; 0: a row's all
    symmetric: bool = True
    floats: bool = False
    ordered: bool = False  # whether `weight_g_idx` says to which group a column belongs
    block: tuple[int, ...] = ()  # rows and columns that share a scale

    def names(self, module: str) -> bool:
        """Return whether a target names a module, whose name here may lack a wrapper's."""
        names = module, module.replace("model.", "model.language_model.", 1)
        return any(
            any(map(_compile_target(entry).match, names)) if entry.startswith("re:")
            else entry in names
            for entry in self.targets
        )  # fmt: skip


def list_weight_groups(settings: Settings) -> Iterator[Group]:
    """Yield the groups of a checkpoint's settings, the specific ones first."""
    groups = settings.get("config_groups")
    parsed = map(_parse, groups.values() if isinstance(groups, Mapping) else ())
    yield from (group for group in parsed if group is not None)


def find_hinted_group(settings: Settings, name: str) -> Group | None:
    """Return the group that names a weight's module, else the first group."""
    groups, module = [*list_weight_groups(settings)], name.removesuffix(".weight")
    first = groups[0] if groups else None
    return next((group for group in groups if group.names(module)), first)


def _parse(group: Any) -> Group | None:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        return None
    block = weights.get("block_structure") or ()
    return Group(
        tuple(map(str, group.get("targets") or ())),
        _count(weights.get("num_bits"), 4),
        _count(weights.get("group_size"), 0),
        weights.get("symmetric", True) is not False,
        weights.get("type") == "float",
        weights.get("actorder") in ORDERS,
        tuple(map(int, re.findall(r"\d+", str(block)))),
    )


def _count(value: Any, default: int) -> int:
    return value if isinstance(value, int) and value > 0 else default


@cache
def _compile_target(target: str) -> re.Pattern[str]:
    try:
        return re.compile(target.removeprefix("re:"))
    except re.error:
        return re.compile(r"(?!)")  # matches nothing


class PackedIntegers(GroupedIntegers):
    """Integers of 1 to 8 bits in int32 words, from the lowest bits on.

    W = (code - zero) * weight_scale, with a scale per row and group of columns. zero is
    2 ** (bits - 1), or in `weight_zero_point`, which is packed along the rows. Files written before
    May 2026 have only whole values in a word, which differs for 3, 5, 6 and 7 bits.
    """

    def __init__(
        self, bits: int, columns: int, weight: Entry, types: Types, symmetric: bool, ordered: bool
    ) -> None:
        """columns: that share a scale, 0 for all."""
        self.bits = bits
        self.block = columns or weight.shape[1] * WORD // bits
        zeros = [] if symmetric else ["_zero_point"]
        self.suffixes = ("", "_scale", "_shape", *zeros, *["_g_idx"] * ordered)
        self.name = f"packed int{bits}{' with zero points' * (not symmetric)}"
        self._columns = columns
        self._words = weight.shape[1]
        self._types = types
        # Rows of whole blocks of 32 have whole words of any width.
        split = columns or self._words % bits == 0
        whole = not ordered and split and self.block % BLOCK == 0
        same = USUAL if symmetric else MOVED
        self.integers = same[4 if bits <= 4 else 8] if whole else None

    def fits(self, shape: Shape) -> bool:
        """Refuse rows of no whole groups, and odd widths whose words may be packed either way."""
        block = self._columns or (BLOCK if self.integers else 1)
        return shape[1] % block == 0 and self._find_packing(shape[1]) is not None

    def parts(self, shape: Shape) -> dict[str, Entry]:
        rows, columns = shape
        pack = self._find_packing(columns) or dense
        groups = columns // (self._columns or columns)
        parts = {
            "": Entry("I32", (rows, pack(columns, self.bits))),
            "_scale": Entry(self._types[0], (rows, groups)),
            "_shape": Entry(self._types[1], (2,)),
            "_zero_point": Entry("I32", (pack(rows, self.bits), groups)),
            "_g_idx": Entry("I32", (columns,)),
        }
        return {suffix: parts[suffix] for suffix in self.suffixes}

    def _find_packing(self, columns: int) -> Packing | None:
        """Return how rows of this length are packed; None if their words don't tell."""
        fitting = [p for p in (dense, loose) if p(columns, self.bits) == self._words]
        if len(fitting) < 2 or WORD % self.bits == 0 or self._words == 1:
            return fitting[0] if fitting else dense
        return None

    def unpack(self, parts: Mapping[str, Tensor]) -> GroupedValues:
        rows, columns = parts["_shape"].tolist()
        pack = self._find_packing(columns) or dense
        middle = 1 << self.bits - 1
        values = unpack_stream(parts[""], self.bits, columns, pack).short() - middle
        zeros = None
        if "_zero_point" in parts:
            codes = unpack_stream(parts["_zero_point"].T, self.bits, rows, pack)
            zeros = codes.T.short() - middle
        groups = torch.arange(columns) // (self._columns or columns)
        if "_g_idx" in parts and (parts["_g_idx"] >= 0).any():  # -1 throughout means none
            groups = parts["_g_idx"]
        return GroupedValues(values, parts["_scale"], zeros, groups)

    def fault(self, parts: Mapping[str, Tensor]) -> str | None:
        rows, columns = parts["_shape"].tolist()
        words, groups = parts[""], parts["_scale"].shape[1]
        fits = dense(columns, self.bits), loose(columns, self.bits)
        uneven = self.integers is not None and columns % BLOCK
        if rows != len(words) or words.shape[1] not in fits or uneven:
            return f"is packed in {[*words.shape]}, but weight_shape says [{rows}, {columns}]"
        order = parts.get("_g_idx")
        if order is None or (order < 0).all():
            return None
        beyond = order.min() < 0 or order.max() >= groups
        return f"has a weight_g_idx beyond its {groups} groups" if beyond else None


Types = tuple[str, str]  # of weight_scale and weight_shape
Packing = Callable[[int, int], int]  # values, bits -> words


def dense(count: int, bits: int) -> int:
    """Return the words of values that are packed without spare bits."""
    return -(-count * bits // WORD)


def loose(count: int, bits: int) -> int:
    """Return the words of values of which none lies in two words."""
    return -(-count // (WORD // bits))


def unpack_stream(words: Tensor, bits: int, count: int, packing: Packing) -> Tensor:
    """Return the first values of each row of int32 words [N, W] as uint8 [N, count]."""
    at = torch.arange(count, device=words.device)
    start = at * bits
    if packing is loose:
        each = WORD // bits
        start = at // each * WORD + at % each * bits
    words = words.clone(memory_format=torch.contiguous_format)  # strides of one word may differ
    bytes = torch.nn.functional.pad(words.view(torch.uint8), (0, 1))
    low, high = bytes[:, start // 8].short(), bytes[:, start // 8 + 1].short()
    return ((low | high << 8) >> (start % 8).short()).bitwise_and_((1 << bits) - 1).byte()


def find_format(name: str, entries: Mapping[str, Entry], settings: Settings) -> Format | None:
    weight, scale, shape = entries[name], entries.get(f"{name}_scale"), entries.get(f"{name}_shape")
    if weight.dtype != "I32" or len(weight.shape) != 2:
        return None
    if shape is None and settings.get("quant_method") != METHOD:
        return None
    groups = 1 if scale is None or len(scale.shape) != 2 else scale.shape[1]
    chosen = _choose_group(settings, name, weight.shape[1], groups)
    symmetric = chosen.symmetric and f"{name}_zero_point" not in entries
    ordered = chosen.ordered or f"{name}_g_idx" in entries
    types = "F32" if scale is None else scale.dtype, "I64" if shape is None else shape.dtype
    return _packed(chosen.bits, chosen.columns, weight, types, symmetric, ordered)


_packed = cache(PackedIntegers)


def _choose_group(settings: Settings, name: str, words: int, scales: int) -> Group:
    """Return the group of settings that agrees with a row's words and scales.

    Of several the one that names the module is chosen; if none agrees, too, so that the check of
    the weight's parts says what differs.
    """
    groups = [*list_weight_groups(settings)] or [
        Group((), 4, words * 8 // scales if scales > 1 else 0)
    ]

    def agrees(group: Group) -> bool:
        if not group.columns:
            return scales == 1
        return words in (pack(scales * group.columns, group.bits) for pack in (dense, loose))

    fitting = [group for group in groups if agrees(group)] or groups
    if len({(group.bits, group.columns, group.symmetric, group.ordered) for group in fitting}) == 1:
        return fitting[0]
    module = name.removesuffix(".weight")
    return next((group for group in fitting if group.names(module)), fitting[0])


def find_unread_setting(settings: Settings) -> str | None:
    """Return the first setting of this method that is not read; None if all are."""
    groups, sparsity = settings.get("config_groups"), settings.get("sparsity_config")
    kinds = [settings, *(groups.values() if isinstance(groups, Mapping) else ()), sparsity]
    formats = [kind["format"] for kind in kinds if isinstance(kind, Mapping) and kind.get("format")]
    if bad := next((format for format in map(str, formats) if format not in READ), None):
        return f"{METHOD} {bad}"
    rotated = settings.get("transform_config")
    rotates = isinstance(rotated, Mapping) and rotated.get("config_groups")
    return f"{METHOD} with transform_config" if rotates else None


def name_kept_format(settings: Settings, module: str) -> str:
    """Return a recipe's name for the layout in which engines keep a module's weight."""
    groups, ignored = [*list_weight_groups(settings)], settings.get("ignore")
    naming = [group for group in groups if group.names(module)]
    naming = naming or [group for group in groups if "Linear" in group.targets]
    left = isinstance(ignored, list) and Group((*map(str, ignored),)).names(module)
    if left or (groups and not naming):
        return "bf16"
    group = naming[0] if naming else Group(())
    if group.floats:
        return {4: "nvfp4", 8: "fp8"}.get(group.bits, "bf16")
    return "int4" if group.bits <= 4 else "int8"


MODULE = FormatModule(
    find=find_format,
    names={".weight_packed": ".weight"},
    methods={METHOD: find_unread_setting},
    reads="compressed-tensors (integers, fp8, nvfp4, mxfp4, mxfp8)",
)
