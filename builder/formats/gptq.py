"""Integers of GPTQ, and of AutoAWQ in its layout `gemm`, also as auto-round stores them."""

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from math import ceil
from typing import Any

from mtpbuild.builder.formats.format import DTYPES, Entry, Format, FormatModule, Parts, Shape
from mtpbuild.builder.formats.integers import (
    BLOCK,
    MOVED,
    USUAL,
    GroupedIntegers,
    GroupedValues,
)
from mtpbuild.builder.lazy_torch import Tensor, torch
from mtpbuild.runtime.errors import CheckpointError

WORD = 32  # bits
WIDTHS = (2, 4, 8)  # bits of codes that fill a word
BITS, GROUP = 4, 128  # unless the settings say others
PACKINGS = {
    *("auto_round", "auto_gptq", "gptq", "gptqmodel", "auto_awq", "awq"),
    *("exllamav2", "triton", "tritonv2"),  # kernels
}
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the numbers of 8 outputs lie in a word of AWQ
SCALES, ZEROS, INDEX = "_scales", "_qzeros", "_g_idx"


class Gptq(GroupedIntegers):
    """Integers in 32-bit words, inputs first: qweight, qzeros [groups, out], scales [groups, out].

    W[n, k] = (code[k, n] - zero[g, n]) * scales[g, n], with g = k // group or g_idx[k]. A word has
    codes of 4 or 8 inputs, or zero points of as many outputs, lowest bits first. Version 1 stores
    zero points less 1. Integers stay in engines if groups are whole blocks of ours.
    """

    method = "gptq"

    def __init__(
        self,
        bits: int,
        group: int,
        scales: str,
        *,
        symmetric: bool,
        less: int,
        indexed: bool,
        ordered: bool,
    ) -> None:
        """group: inputs that share a scale, -1 for all. scales: their dtype.

        symmetric: whether all zero points are in the middle. less: what zero points are stored less
        by. indexed: whether `g_idx` is there. ordered: whether inputs are in their groups' order.
        """
        self.name = f"{self.method} int{bits}"
        self.bits = bits
        self.block = group
        self.suffixes = ("", ZEROS, SCALES, *[INDEX] * indexed)
        self._scales = scales
        self._symmetric = symmetric
        self._less = less
        whole = ordered and (group < 0 or group % BLOCK == 0)
        same = USUAL if symmetric else MOVED
        self.integers = same.get(bits, MOVED[4]) if whole else None

    def to_engine_format(self, name: str, parts: Parts) -> Parts:
        """Raise CheckpointError if inputs are not in the order of their groups."""
        if self.integers is not None and INDEX in parts:
            index = parts[INDEX].long()
            if not torch.equal(index, self._list_groups(len(index))):
                raise CheckpointError(
                    f"{name}{INDEX} has inputs in another order, but the quantisation settings "
                    "don't say desc_act: set it to true there"
                )
        return super().to_engine_format(name, parts)

    def unpack(self, parts: Mapping[str, Tensor]) -> GroupedValues:
        middle = 1 << max(self.bits, 4) - 1  # of the engine's integers
        values = self.codes(parts[""]).short() - middle
        zeros = None if self._symmetric and self.bits > 2 else self.zeros(parts[ZEROS]) - middle
        groups = parts[INDEX].long() if INDEX in parts else self._list_groups(values.shape[1])
        return GroupedValues(values, parts[SCALES].T, zeros, groups)

    def _list_groups(self, inputs: int) -> Tensor:
        """Return the group of each input if they are in order."""
        return torch.arange(inputs) // (inputs if self.block < 0 else self.block)

    def fits(self, shape: Shape) -> bool:
        if self.integers is not None and shape[1] % BLOCK:
            return False
        return all(size * self.bits % WORD == 0 for size in self.packed(shape))

    def packed(self, shape: Shape) -> tuple[int, ...]:
        """Return the sizes that are split into words."""
        return shape

    def parts(self, shape: Shape) -> dict[str, Entry]:
        rows, columns = shape
        groups = count_groups(columns, self.block)
        parts = {
            "": Entry("I32", self.words(shape)),
            ZEROS: Entry("I32", (groups, rows * self.bits // WORD)),
            SCALES: Entry(self._scales, (groups, rows)),
            INDEX: Entry("I32", (columns,)),
        }
        return {suffix: parts[suffix] for suffix in self.suffixes}

    def words(self, shape: Shape) -> Shape:
        """Return the shape of qweight."""
        return shape[1] * self.bits // WORD, shape[0]

    def codes(self, words: Tensor) -> Tensor:
        """Unpack qweight: uint8 [out, in]."""
        return unpack_words(words, self.bits).permute(1, 0, 2).flatten(1)

    def zeros(self, words: Tensor) -> Tensor:
        """Unpack qzeros: int16 [out, groups]."""
        return unpack_words(words, self.bits).flatten(1).T.short() + self._less

    def fault(self, parts: Mapping[str, Tensor]) -> str | None:
        stored, middle = self.zeros(parts[ZEROS]), 1 << self.bits - 1
        if self._symmetric and (stored != middle).any():
            return (
                f"has zero points other than the {middle} of symmetric weights: its settings are "
                "wrong in sym, or in the version (checkpoint_format, packing_format)"
            )
        if int(stored.max()) >> self.bits:
            return "has zero points that version 1 of GPTQ can't store, so their values are unknown"
        if INDEX in parts:
            least, largest = parts[INDEX].aminmax()
            if int(least) < 0 or int(largest) >= stored.shape[1]:
                return f"has g_idx from {least} to {largest} for {stored.shape[1]} groups"
        return None


class Awq(Gptq):
    """AWQ: a word holds the 4-bit numbers of 8 outputs, of one input or of one group."""

    method = "awq"

    def packed(self, shape: Shape) -> tuple[int, ...]:
        return shape[:1]

    def words(self, shape: Shape) -> Shape:
        return shape[1], shape[0] * self.bits // WORD

    def codes(self, words: Tensor) -> Tensor:
        return unpack_words(words, self.bits)[..., ORDER].flatten(1).T

    def zeros(self, words: Tensor) -> Tensor:
        return self.codes(words).short()


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Split words [.., C] of int32 into codes of uint8 [.., C, 32 / bits], lowest bits first."""
    words = words.clone(memory_format=torch.contiguous_format)  # strides of one word may differ
    codes = words.view(torch.uint8).unflatten(-1, (-1, WORD // 8))[..., None]
    if bits < 8:
        codes = codes >> torch.arange(0, 8, bits, dtype=torch.uint8) & (1 << bits) - 1
    return codes.flatten(-2)


@cache  # formats are compared by `is`
def make_format(kind: type[Gptq], **geometry: Any) -> Gptq:
    return kind(**geometry)


def find_format(
    name: str, entries: Mapping[str, Entry], settings: Mapping[str, Any]
) -> Format | None:
    if entries[name].dtype != "I32":
        return None
    if is_awq(settings):
        return infer_format(Awq, name, entries, settings)
    known = find_gptq_version(settings) is not None
    return infer_format(Gptq, name, entries, settings) if known else None


def infer_format(
    kind: type[Gptq], name: str, entries: Mapping[str, Entry], settings: Mapping[str, Any]
) -> Format:
    """Return the format of weight `name`, whose tensors tell bits and groups.

    Settings of some modules alone differ, and their lists are not reliable. What the tensors don't
    tell is as the settings say, so that the missing or wrong tensor is found.
    """
    weight, none = entries[name], Entry("F16", ())
    scales, zeros = (entries.get(f"{name}{suffix}", none) for suffix in (SCALES, ZEROS))
    chosen = find_settings_of(name, settings)
    bits, group = chosen.get("bits", chosen.get("w_bit")), find_group_size(chosen)
    if all(len(each.shape) == 2 and all(each.shape) for each in (weight, scales, zeros)):
        width = WORD * zeros.shape[1] / scales.shape[1]
        bits = int(width) if width in WIDTHS else bits
        inputs = weight.shape[0] * (WORD // bits if kind is Gptq and bits in WIDTHS else 1)
        said = (group, *map(find_group_size, (settings, *list_rules(settings).values())))
        group = next((g for g in said if count_groups(inputs, g) == scales.shape[0]), group)
    indexed = f"{name}{INDEX}" in entries
    return make_format(
        kind,
        bits=bits if bits in WIDTHS else BITS,
        group=group,
        scales=scales.dtype if scales.dtype in DTYPES else "F16",
        symmetric=bool(chosen.get("sym", not chosen.get("zero_point", True))),
        less=int(find_gptq_version(settings) == 1),
        indexed=indexed,
        ordered=not (indexed and chosen.get("desc_act", False)),
    )


def count_groups(inputs: int, group: int) -> int:
    return 1 if group < 0 else ceil(inputs / group)


def find_group_size(settings: Mapping[str, Any]) -> int:
    """Return the number of inputs that share a scale, -1 for all of them."""
    group = settings.get("group_size", settings.get("q_group_size", GROUP))
    return group if isinstance(group, int) and group > 0 else -1


def list_rules(settings: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the settings of some modules alone, of GPTQModel or auto-round, by name or pattern."""
    rules = settings.get("dynamic") or settings.get("extra_config")
    named = rules.items() if isinstance(rules, dict) else ()
    return {name: rule or {} for name, rule in named if isinstance(rule or {}, dict)}


def find_settings_of(name: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a weight's module."""
    module = name.removesuffix(".weight")
    names = (module, module.replace("model.", "model.language_model.", 1))
    rules = list_rules(settings)
    matching = (r for r, pattern in patterns(tuple(rules)) if any(map(pattern.search, names)))
    rule = next((n for n in names if n in rules), None) or next(matching, None)
    return settings if rule is None else {**settings, **rules[rule]}


@cache
def patterns(rules: tuple[str, ...]) -> list[tuple[str, re.Pattern[str]]]:
    """Return the rules that are regular expressions.

    GPTQModel's begin with the name; "+:" is before them, or "-:" for modules that are left alone.
    """
    expressions = list[tuple[str, re.Pattern[str]]]()
    for rule in rules:
        if re.search(r"[*+?^$|()\[\]\\]", rule):
            anchored = rf"\A(?:{rule[2:]})" if rule[1:2] == ":" else rule
            with suppress(re.error):  # no pattern; names are compared whole, too
                expressions.append((rule, re.compile(anchored)))
    return expressions


def find_gptq_version(settings: Mapping[str, Any]) -> int | None:
    """Return the version of GPTQ's zero points, None if the settings name another format."""
    method, packing = settings.get("quant_method"), name_packing(settings)
    if method == "auto-round" and "awq" not in packing:
        return 1 if "gptq" in packing and "gptqmodel" not in packing else 2
    if method == "gptq":
        return 2 if name_layout(settings) == "gptq_v2" else 1
    return None


def name_packing(settings: Mapping[str, Any]) -> str:
    """Return the layout of auto-round; without a name it is that of GPTQ, as auto-round reads."""
    packing = settings.get("packing_format")
    return "auto_round:auto_gptq" if packing in (None, "auto") else str(packing)


def name_layout(settings: Mapping[str, Any]) -> str:
    return str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()


def find_unread_gptq(settings: Mapping[str, Any]) -> str | None:
    """Return the first setting of this method that is not read; None if all are."""
    layout = "marlin" if settings.get("is_marlin_format") else name_layout(settings)
    if layout not in ("gptq", "gptq_v2"):
        return f"gptq in the layout {layout}"
    bits = settings.get("bits", BITS)
    return None if bits in WIDTHS else f"gptq with {bits} bits"


def find_unread_auto_round(settings: Mapping[str, Any]) -> str | None:
    """Return what is not read of auto-round's settings; None if they are."""
    packing, bits = name_packing(settings), settings.get("bits", BITS)
    kind = str(settings.get("data_type", "int"))
    if kind != "int" or not PACKINGS.issuperset(packing.split(":")):
        return f"auto-round {kind} packed as {packing}"
    if (inputs := settings.get("act_bits")) is not None and inputs < 16:
        return f"auto-round with inputs of {inputs} bits"
    widths = (BITS,) if "awq" in packing else WIDTHS
    return None if bits in widths else f"auto-round with {bits} bits"


def is_awq(settings: Mapping[str, Any]) -> bool:
    method = settings.get("quant_method")
    by_auto_round = method == "auto-round" and "awq" in name_packing(settings)
    return method == "awq" or by_auto_round


def find_unread_awq(settings: Mapping[str, Any]) -> str | None:
    """Return the first setting of this method that is not read; None if all are."""
    said = (settings.get(key) for key in ("version", "format", "checkpoint_format"))
    if (layout := str(next(filter(None, said), "gemm")).lower()) != "gemm":
        return f"awq in the layout {layout}"
    bits = settings.get("bits", settings.get("w_bit", 4))
    return None if bits == 4 else f"awq with {bits} bits"


MODULE = FormatModule(
    find=find_format,
    names={
        ".qweight": ".weight",
        ".qzeros": f".weight{ZEROS}",
        ".scales": f".weight{SCALES}",
        ".g_idx": f".weight{INDEX}",
    },
    methods={
        "awq": find_unread_awq,
        "gptq": find_unread_gptq,
        "auto-round": find_unread_auto_round,
    },
    reads="AWQ in the layout gemm, GPTQ and auto-round with 2, 4 or 8 bits",
)
