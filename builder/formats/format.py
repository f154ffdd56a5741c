"""The interface of number formats, and descriptions of the tensors that store weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any

from mtpbuild.builder.lazy_torch import Tensor, torch
from mtpbuild.runtime.errors import CheckpointError

Shape = tuple[int, ...]
Parts = dict[str, Tensor]  # of a weight, by suffix
Settings = Mapping[str, Any]  # the object `quantization_config`, {} if there is none
MAX_COARSE = 0.01  # of a weight: the part of its squares whose scales fp16 may change by an eighth
LEAST_GROUP = 16  # fewest inputs that may share a scale after ranks have cut a weight
SIZES = {  # bytes per element
    **{"F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4},
    **{"U32": 4, "I32": 4, "I64": 8},
}
NAMES = {  # torch dtype -> its name in safetensors
    "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "uint8": "U8", "int8": "I8",
    "uint32": "U32", "int32": "I32", "int64": "I64",
    "bfloat16": "BF16", "float16": "F16", "float32": "F32",
}  # fmt: skip
DTYPES = ("BF16", "F16", "F32")  # of weights that are not quantised
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
    def floats(self) -> bool:
        return self.dtype in DTYPES

    @property
    def type(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, TYPES[self.dtype])
        return dtype


Entries = Mapping[str, Entry]  # of a checkpoint, by name


def make_entry(tensor: Tensor) -> Entry:
    return Entry(NAMES[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape))


class Format(ABC):
    """A number format: it stores a weight [out, in] as one or more tensors, its parts.

    Each part is named `X.weight` plus one of `suffixes`.
    """

    name: str
    bits: int  # of a value
    block: int  # columns that share a scale
    suffixes: tuple[str, ...]  # the first part, "", holds the values
    needs_amax = False  # whether `encode` needs `amax`
    packs = False  # whether engines hold it in the layout of the CPU's kernels
    looks_up = False  # whether an engine's embedding may have it
    offsets: str | None = None  # what a block has besides its scale: "zeros" or "minima"

    @property
    def engine_format(self) -> Format:
        """The format in which engines keep weights of this format."""
        return self

    def to_engine_format(self, name: str, parts: Parts) -> Parts:
        """Return the parts of weight `name` in the format `engine_format`."""
        return parts

    def represents(self, kept: Format) -> bool:
        """Return whether weights that are kept in a format have the same values in this one."""
        return self.packs == kept.packs and kept.offsets in (None, self.offsets)

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

    def engine_entries(self, shape: Shape, group: int, joined: int | None) -> Iterable[Entry]:
        """Return the tensors that an engine for GPUs holds of a weight [out, in] of this format.

        group: the number of inputs that share a scale. joined: as for `finish`.
        """
        return self.parts(shape).values()

    def fault(self, parts: Mapping[str, Tensor]) -> str | None:
        """Return what is wrong with a weight's numbers, None if nothing is."""
        return None

    @abstractmethod
    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the weight in fp32: values times scales, rounded once."""

    @abstractmethod
    def encode(self, weight: Tensor, amax: Tensor | None = None) -> Parts:
        """Encode an fp32 weight, or some of its rows that are whole rows of blocks.

        amax (0-dim): the largest magnitude of the weight, or of all weights that share its second
        scale.
        """

    def sum_coarse(self, weight: Tensor) -> Tensor:
        """Sum squares of blocks: of those whose scales are rounded by much, and of all."""
        return torch.zeros(2)

    def can_split(self, ranks: int, group: int) -> bool:
        """Return whether that many ranks can share a weight; group: inputs that share a scale."""
        return group >= LEAST_GROUP

    def rows(self, suffix: str, part: Tensor, shape: Shape, group: int) -> Tensor:
        """Return a part of a weight of this shape as [out, ..], which ranks cut and then join.

        group: the number of inputs that share a scale in the engine.
        """
        return part.view(torch.uint8)

    def finish(self, suffix: str, part: Tensor, joined: int | None) -> Tensor:
        """Return the engine's tensor [.., in, out] from parts joined along axis `joined`."""
        return part

    def pack(self, suffix: str, part: Tensor) -> Tensor:
        """Return a part [.., out, ..] in the layout of the CPU's kernels, if `packs`."""
        raise NotImplementedError

    def shape_second_scales(self, shape: Shape, joined: int | None) -> tuple[int, int] | None:
        """Return the shape of an engine weight's second scales, None if the format has none."""
        return None


class ReadFormat(Format):
    """A format that is only read."""

    def encode(self, weight: Tensor, amax: Tensor | None = None) -> Parts:
        raise NotImplementedError(f"{self.name} is only read")


class GgmlFormat(ReadFormat):
    """Weights that their file's own reader decodes; name: of the format in that file."""

    bits, block, suffixes = 32, 1, ("",)

    def __init__(self, name: str) -> None:
        self.name = name

    def parts(self, shape: Shape) -> dict[str, Entry]:
        return {"": Entry("F32", shape)}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts[""]


@dataclass(frozen=True)
class FormatModule:
    """The formats that a module of this folder reads."""

    # Finds the format of a weight by its name, the checkpoint's tensors and the settings.
    find: Callable[[str, Entries, Settings], Format | None]
    formats: tuple[Format, ...] = ()  # that engines keep
    # Endings of a checkpoint's tensors -> our own, as `.qweight` -> `.weight`.
    names: Mapping[str, str] = field(default_factory=dict)
    # Values of quant_method -> a function that says what of the settings is not read.
    methods: Mapping[str, Callable[[Settings], str | None]] = field(default_factory=dict)
    reads: str | None = None  # what messages say


def refuse_out_of_range(format: Format, name: str, weight: Tensor) -> None:
    """Raise CheckpointError if the format has no scales for a whole weight's values."""
    refuse_too_large(format, name, weight)
    refuse_too_small(format, name, format.sum_coarse(weight))


def refuse_too_small(format: Format, name: str, sums: Tensor) -> None:
    """Raise CheckpointError if the results of `sum_coarse` say that a weight loses accuracy."""
    coarse, total = sums.tolist()
    if coarse > MAX_COARSE * total:
        raise CheckpointError(
            f"{name} is too small for {format.name}, whose scales are in fp16: keep this weight "
            "in floats, or scale it up"
        )


def refuse_too_large(format: Format, name: str, weight: Tensor) -> None:
    """Raise CheckpointError if a weight has values that are too large for the format's scales."""
    largest = weight.abs().max().item()
    if largest > format.most:
        raise CheckpointError(
            f"{name} holds {largest:,.0f}, but {format.name} ends at {format.most:,.0f}: "
            "keep this weight in floats, or scale it down"
        )
