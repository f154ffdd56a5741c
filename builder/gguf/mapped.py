"""A tensor of a GGUF file as Hugging Face's checkpoints have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mtpbuild.builder.formats import Entry, Format, Shape
from mtpbuild.builder.formats.format import GgmlFormat
from mtpbuild.builder.formats.integers import BLOCK, INT4, INT8, BlockMinima
from mtpbuild.builder.formats.mxfp4 import FP4
from mtpbuild.builder.gguf.container import Floats, RawTensor
from mtpbuild.builder.lazy_torch import Tensor, torch

Change: TypeAlias = "Callable[..., Floats]"
Order = npt.NDArray[np.intp]
# Types whose codes engines keep.
INTEGERS: dict[str, Format] = {
    "Q8_0": INT8,
    "Q4_0": INT4,
    "MXFP4": FP4,
    **{kind: BlockMinima(kind.lower()) for kind in ("Q4_1", "Q4_K")},
}
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
decoded = cache(GgmlFormat)  # formats are compared by `is`


@dataclass(frozen=True)
class Tiles:
    """Value heads in tiled order: for each repeat a head of every key head.

    Checkpoints have them grouped: for each key head all its value heads. start: rows before them.
    """

    keys: int
    repeats: int
    width: int
    start: int = 0

    def grouped(self, unit: int = 1) -> Order:
        """Return the place of each grouped unit in the tiled order."""
        heads = np.arange(self.keys * self.repeats * self.width // unit)
        tiled = heads.reshape(self.repeats, self.keys, -1).swapaxes(0, 1).ravel()
        start = self.start // unit
        return np.concatenate([np.arange(start), start + tiled])


@dataclass(frozen=True)
class Columns:
    """The columns that one weight has of a tensor."""

    start: int
    width: int

    def grouped(self, unit: int = 1) -> Order:
        """Return the places of the columns, in units of so many."""
        return np.arange(self.start // unit, (self.start + self.width) // unit)


@dataclass(frozen=True, eq=False)
class GgufWeight:
    """A weight as the checkpoint has it, made from one or more tensors of a file.

    Tensors are joined along their rows, and put in order; `change` then makes the weight's values
    from the decoded tensors.
    """

    name: str
    shape: Shape
    tensors: tuple[RawTensor, ...]
    expert: int | None = None  # of a stack
    part: slice | None = None  # rows of an expert's tensor
    # The file's rows in the checkpoint's order; called after shapes were checked, as keys tell it.
    rows: Callable[[], Order] | None = None
    columns: Tiles | Columns | None = None
    change: Change | None = None
    as_floats: bool = False  # whether integers are decoded, as kernels would round the inputs
    suffix: str | None = None  # of a part of our own integers; None: values, as they are

    @property
    def file(self) -> Path:
        return self.tensors[0].file

    @property
    def integers(self) -> Format | None:
        """The format of a weight whose codes engines keep; None for other weights."""
        (kind, *others) = {tensor.type for tensor in self.tensors}
        splits = self.columns is not None and self.columns.width % BLOCK
        if others or splits or self.change is not None or self.as_floats or len(self.shape) != 2:
            return None
        return INTEGERS.get(kind)

    @property
    def format(self) -> Format | None:
        """The weight's format; None if it is read as floats of the file."""
        if (integers := self.integers) is not None:
            return integers
        kinds = sorted({tensor.type for tensor in self.tensors} - FLOATS.keys())
        return decoded(" and ".join(kinds).lower()) if kinds and not self.as_floats else None

    def entries(self) -> Iterator[tuple[str, Entry, GgufWeight]]:
        """Yield the name, the header entry and the source of each tensor that stores the weight."""
        if (integers := self.integers) is None:
            kinds = {tensor.type for tensor in self.tensors}
            kind = min(kinds) if len(kinds) == 1 and self.change is None else "F32"
            yield self.name, Entry(kind if kind in FLOATS else "F32", self.shape), self
            return
        for suffix, entry in integers.parts(self.shape).items():
            yield self.name + suffix, entry, replace(self, suffix=suffix)

    def read(self) -> Tensor:
        """Read the tensor that its entry describes."""
        if self.change is not None:
            shaped = (
                self._reorder(each.decode(each.read(self.expert))).reshape(each.shape)
                for each in self.tensors
            )
            return torch.from_numpy(np.ascontiguousarray(self.change(*shaped))).reshape(self.shape)
        if len({tensor.type for tensor in self.tensors}) > 1:
            decoded = [tensor.decode(tensor.read(self.expert)) for tensor in self.tensors]
            return torch.from_numpy(self._reorder(np.concatenate(decoded))).reshape(self.shape)
        tensor = self.tensors[0]
        blocks = np.concatenate([each.read(self.expert) for each in self.tensors])
        blocks = blocks[self.part or slice(None)]
        if self.suffix is not None:
            return torch.from_numpy(self._reorder(tensor.split(blocks)[self.suffix], BLOCK))
        if tensor.type in FLOATS:
            dtype: torch.dtype = getattr(torch, FLOATS[tensor.type])
            values = np.ascontiguousarray(self._reorder(blocks))
            return torch.from_numpy(values).view(dtype).reshape(self.shape)
        return torch.from_numpy(self._reorder(tensor.decode(blocks))).reshape(self.shape)

    def _reorder(self, values: npt.NDArray[Any], unit: int = 1) -> npt.NDArray[Any]:
        """Put rows and columns in the checkpoint's order; unit: columns in a block."""
        if self.rows is not None:
            values = values[self.rows()]
        if self.columns is not None:
            values = values[:, self.columns.grouped(unit)]
        return np.ascontiguousarray(values)
