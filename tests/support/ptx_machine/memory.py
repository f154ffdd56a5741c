"""The memory that threads load and store: the launch's tensors, and programs' shared memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
BEGIN, APART = 1 << 40, 256  # where tensors begin, and their alignment
UNKNOWN = 0xFF  # each byte before it is written: floats are NaN


class PtxError(AssertionError):
    """Reports that a kernel does something that fails on a GPU, or has random results there."""


class Memory:
    """Bytes that many threads load and store at once."""

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, UNKNOWN, np.uint8)

    def load(self, at: Array, width: int) -> Array:
        """Load one value of `width` bytes for each index into `bytes`."""
        return self.bytes.view(f"u{width}")[_whole(at, width)]

    def store(self, at: Array, values: Array) -> None:
        width = values.dtype.itemsize
        self.bytes.view(f"u{width}")[_whole(at, width)] = values


def _whole(at: Array, width: int) -> Array:
    if (at % width).any():
        raise PtxError(f"an address is not a multiple of {width} bytes")
    return at // width


class Watch:
    """Which threads last touched each unit of two bytes, from `begin` on.

    Threads are known by a number, which has the warp in its lowest bits, and above it the program
    and the barriers that it has met: two warps conflict if those are equal.
    """

    UNIT, WARPS = 2, 64

    def __init__(self, begin: int, end: int) -> None:
        self.begin = begin
        units = -(-(end - begin) // self.UNIT)
        self._written, self._read = np.zeros(units, np.int64), np.zeros(units, np.int64)

    def reads(self, at: Array, width: int, who: Array) -> None:
        units, who = self._units(at, width, who)
        self._apart(self._written[units], who, "reads what another one writes")
        self._read[units] = who

    def writes(self, at: Array, width: int, who: Array) -> None:
        units, who = self._units(at, width, who)
        self._apart(self._read[units], who, "writes what another one reads")
        self._written[units] = who

    def _units(self, at: Array, width: int, who: Array) -> tuple[Array, Array]:
        watched = at >= self.begin
        first = (at[watched, None] - self.begin) // self.UNIT
        units = first + np.arange(max(1, width // self.UNIT))
        return units, np.broadcast_to(who[watched, None], units.shape)

    def _apart(self, before: Array, now: Array, what: str) -> None:
        same = before // self.WARPS == now // self.WARPS
        if (same & (before != now)).any():
            raise PtxError(f"a warp {what} without a barrier between")


class Tensors(Memory):
    """The launch's tensors in one address space, with gaps that nobody may touch."""

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self.tensors, self._outputs = (*inputs, *outputs), len(outputs)
        sizes = [tensor.numel() * tensor.element_size() for tensor in self.tensors]
        places = np.cumsum([0, *(-(-size // APART) * APART + APART for size in sizes)])
        super().__init__(int(places[-1]) + APART)
        self.begins, self.ends = places[:-1], places[:-1] + np.array(sizes, np.int64)
        self._watch = Watch(int(places[len(inputs)]), len(self.bytes))
        for tensor, begin, end in zip(self.tensors, self.begins, self.ends, strict=True):
            self.bytes[begin:end] = tensor.contiguous().view(torch.uint8).flatten().numpy()

    def addresses(self) -> list[int]:
        return [BEGIN + int(begin) for begin in self.begins]

    def load_by(self, who: Array, addresses: Array, width: int) -> Array:
        at = self.index(addresses, width)
        self._watch.reads(at, width, who)
        return self.load(at, width)

    def store_by(self, who: Array, addresses: Array, values: Array) -> None:
        width = values.dtype.itemsize
        at = self.index(addresses, width)
        if (at < self._watch.begin).any():
            raise PtxError("an input is written to")
        self._watch.writes(at, width, who)
        self.store(at, values)

    def index(self, addresses: Array, width: int) -> Array:
        """Return the index into `bytes` of an address; raise PtxError beyond the tensors."""
        at = addresses.astype(np.int64) - BEGIN
        of = np.searchsorted(self.begins, at, side="right") - 1
        beyond = (of < 0) | (at + width > self.ends[of])
        if beyond.any():
            i = int(np.flatnonzero(beyond)[0])
            raise PtxError(f"{width} bytes at {at[i] - self.begins[of[i]]} of tensor {of[i]}")
        return at

    def give_back(self) -> None:
        """Copy the kernel's results into the outputs."""
        for i in range(len(self.tensors) - self._outputs, len(self.tensors)):
            left = torch.from_numpy(self.bytes[self.begins[i] : self.ends[i]].copy())
            tensor = self.tensors[i]
            tensor.copy_(left.view(tensor.dtype).view(tensor.shape))


class Shared(Memory):
    """The programs' shared memories, one after the other."""

    def __init__(self, programs: int, size: int) -> None:
        self.size = -(-max(size, 1) // 16) * 16
        super().__init__(programs * self.size)
        self._watch = Watch(0, len(self.bytes))

    def load_by(self, who: Array, programs: Array, offsets: Array, width: int) -> Array:
        at = self._index(programs, offsets, width)
        self._watch.reads(at, width, who)
        return self.load(at, width)

    def store_by(self, who: Array, programs: Array, offsets: Array, values: Array) -> None:
        self.claim(who, programs, offsets, values.dtype.itemsize)
        self.store(self._index(programs, offsets, values.dtype.itemsize), values)

    def claim(self, who: Array, programs: Array, offsets: Array, width: int) -> None:
        """Note that bytes may be written from now on."""
        self._watch.writes(self._index(programs, offsets, width), width, who)

    def _index(self, programs: Array, offsets: Array, width: int) -> Array:
        if ((offsets < 0) | (offsets + width > self.size)).any():
            raise PtxError(f"shared memory has {self.size} bytes, and {offsets.max()} is touched")
        return programs * self.size + offsets
