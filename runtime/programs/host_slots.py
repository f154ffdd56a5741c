"""Slots in the host's memory, whose caches have only the rows in use."""

import contextlib
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtpbuild.runtime.contract.controls import ALLOWED
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import (
    PREFILL,
    SCORE,
    Bools,
    Constraint,
    Ints,
    Piece,
    Scores,
    host_type,
)
from mtpbuild.runtime.contract.state import StateSpec
from mtpbuild.runtime.programs.slots import Caches, Slots, finite, own_outputs

ROW_STEP = 128  # a program's caches are given in multiples of this many rows
GROWTH = 1.25  # of the rows of several slots, when one of them outgrows them
LARGE = 1 << 24  # bytes of a cache from which on it gives back memory that it left
FILLING = (PREFILL, SCORE)  # programs of a prompt's chunk
HUGE_PAGES = 1 << 22  # bytes from which on NumPy asks for huge pages, and so does this


class HostMemory:
    """Makes NumPy arrays; bfloat16 is held as bits."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        return np.zeros(shape, host_type(dtype))

    def copy(self, source: NDArray[Any], target: NDArray[Any]) -> None:
        target[...] = source

    def host(self, array: NDArray[Any]) -> NDArray[Any]:
        return array


class HostSlots(Slots):
    """Slots of a target that runs on the host."""

    _caches: "PackedCaches"

    def __init__(self, manifest: Manifest, caches: "PackedCaches", copies: int = 1) -> None:
        super().__init__(manifest, HostMemory(), caches, copies)
        if manifest.pools and caches.device == "cpu":
            self.features |= {Feature.POOL}
        self._saved: dict[int, Mapping[str, NDArray[Any]]] = {}
        self._outputs = {
            name: self._zeros(own_outputs(program))
            for name, program in manifest.programs.items()
            if name not in FILLING
        }

    def drafts(self, slot: int) -> list[int]:
        carries = self._carries[self._now]
        drafts: list[int] = carries["window"][slot, 1 : 1 + carries["num_drafts"][slot]].tolist()
        return drafts

    def constrain(self, slot: int, constraint: Constraint) -> None:
        """A draft that is certain has all of its row's probability, as one that was drawn so."""
        self._controls[ALLOWED][slot] = constraint.allowed
        carries, kept, count = self._carries[self._now], constraint.kept, len(constraint.drafts)
        carries["num_drafts"][slot] = count
        carries["window"][slot, 1 + kept : 1 + count] = constraint.drafts[kept:]
        for place in range(kept, count):
            carries["draft_probs"][slot, place] = 0
            carries["draft_probs"][slot, place, constraint.drafts[place]] = 1

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        self._caches.park(slot, start + len(tokens) - self.lookahead)
        self._run_chunk(PREFILL, slot, self._prompt_inputs(start, tokens))

    def score(self, slot: int, start: int, tokens: Ints, following: Ints) -> Scores:
        self._caches.park(slot, start + len(tokens) - self.lookahead)
        asked = {"following": following[None]}
        found = self._run_chunk(SCORE, slot, self._prompt_inputs(start, tokens) | asked)
        return Scores(**{name: array[0] for name, array in found.items()})

    def save_rows(self, number: int, slot: int, start: int, stop: int) -> None:
        self._saved[number] = self._caches.rows_of(slot, start, stop)

    def save_states(self, number: int, slot: int) -> None:
        carries = self._carries[self._now]
        self._saved[number] = {name: carries[name][slot].copy() for name in self._recurrent}

    def load_rows(self, slot: int, pieces: Sequence[Piece]) -> None:
        found = [(self._saved[number], first, count) for number, first, count in pieces]
        self._caches.fill(slot, found)

    def load_states(self, slot: int, number: int) -> None:
        for carries in self._carries:
            for name, array in self._saved[number].items():
                carries[name][slot] = array

    def discard(self, number: int) -> None:
        self._saved.pop(number, None)  # its file may never have been read

    def saved(self, number: int) -> Mapping[str, NDArray[Any]]:
        return self._saved[number]

    def adopt(self, number: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._saved[number] = arrays

    def _run_chunk(
        self, program: str, slot: int, given: dict[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        """Runs a program of a prompt's chunk; returns its outputs, which the next run may reuse."""
        raise NotImplementedError

    def _activate(self, active: Bools) -> tuple[str, int]:
        """Returns the program of this step, and how many slots it computes."""
        self._active[:] = active
        return self._choose(active, self._mixed)


def rounded(rows: int, capacity: int) -> int:
    """Returns how many rows a program is given that wants `rows` of them."""
    return min(-(-rows // ROW_STEP) * ROW_STEP, capacity)


class Pages:
    """Zeros [rows, width] in memory that comes as it is written to, and can be given back."""

    def __init__(self, shape: tuple[int, int], dtype: str) -> None:
        kind = np.dtype(host_type(dtype))
        self._row = shape[1] * kind.itemsize
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, shape[0] * self._row, flags=private)
        if len(self._memory) >= HUGE_PAGES and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.array = np.frombuffer(self._memory, kind).reshape(shape)

    def give_back(self, start: int, end: int) -> None:
        """Let go of whole pages in rows `start` to `end`, which are zeros from then on."""
        first = -(-start * self._row // mmap.PAGESIZE) * mmap.PAGESIZE
        length = end * self._row // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, first, length)


class PackedCaches(Caches):
    """Caches [B, 1, S, C] laid out for the rows in use, so that a step reads only those.

    A graph takes contiguous tensors. So of the slots that a step computes, the first `packed` ones,
    the first `rows` rows are adjacent at the beginning of an allocation of B * S rows. The others
    are parked: slot b has the S rows from b * S on, where no step and no other prompt reaches it.
    Where neither is, a large cache has no memory.
    """

    device = "cpu"

    def __init__(self, state: Sequence[StateSpec]) -> None:
        specs = [s for s in state if s.role == "rows"]
        self._batch = max(s.sizes["batch"] for s in specs)
        self._capacity = max(s.sizes["rows"] for s in specs)
        self.rows = self.packed = 0
        self._parked = [0] * self._batch  # rows in use of a slot that is parked
        self._reserved = 0  # rows of an allocation that were written to
        # Zeros: a masked row weighs next to nothing, but of an uninitialised NaN that is a NaN.
        flat = ((s, (self._batch * self._capacity, s.sizes["width"])) for s in specs)
        pages = {s.name: Pages(shape, s.dtype) for s, shape in flat}
        self._flat = {name: held.array for name, held in pages.items()}
        self._large = [held for held in pages.values() if held.array.nbytes >= LARGE]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Returns all slots, packed for it."""
        rows = max(self.rows, *self._parked)
        if rows != self.rows:
            self._lay_out(rows)
        self.pack(self._batch)
        return self.views(0, self._batch)

    def views(self, first: int, count: int) -> dict[str, NDArray[Any]]:
        """Shows caches [count, 1, rows, C] of packed slots from `first` on, or of a parked one."""
        packed = first < self.packed
        assert first + count <= self.packed if packed else count == 1
        rows = self.rows if packed else rounded(self._parked[first], self._capacity)
        start = self.start(first)
        return {
            name: flat[start : start + count * rows].reshape(count, 1, rows, flat.shape[1])
            for name, flat in self._flat.items()
        }

    def start(self, slot: int) -> int:
        """Say where a slot's rows begin in each allocation."""
        return slot * (self.rows if slot < self.packed else self._capacity)

    def pointers(self) -> dict[str, int]:
        """Returns the address of each cache in the memory of `device`."""
        return {name: flat.ctypes.data for name, flat in self._flat.items()}

    def fit(self, rows: int) -> bool:
        wanted = rounded(rows, self._capacity)
        if self._batch > 1:  # moving slots costs: grow by more than is asked for, shrink late
            if wanted > self.rows:
                wanted = max(wanted, rounded(int(GROWTH * self.rows), self._capacity))
            elif wanted * 2 > self.rows:
                wanted = self.rows
        if wanted == self.rows:
            return False
        self._lay_out(wanted)
        return True

    def pack(self, count: int) -> None:
        """Let the first `count` slots be adjacent, for a step."""
        self._reserve(count * self.rows)
        if count <= self.packed:
            return
        # Upwards: a slot's rows move down, where only slots are that have moved already.
        self._relocate(
            [(b * self._capacity, b * self.rows) for b in range(self.packed, count)], self.rows
        )
        self.packed = count
        self._give_back()

    def park(self, slot: int, rows: int) -> None:
        """Let a slot, and those above it, be in places of their own; it has so many rows."""
        self._unpack(slot)
        self._parked[slot] = rows

    def move(self, source: int, target: int, lengths: NDArray[Any]) -> None:
        self.copy(source, target, int(lengths[source]))

    def copy(self, source: int, slot: int, rows: int) -> None:
        if slot < self.packed <= source:
            self._unpack(slot)
        self._relocate([(self.start(source), self.start(slot))], rows)
        self._parked[slot] = rows

    def finite(self, slot: int, rows: int) -> bool:
        start = self.start(slot)
        end = start + min(rows, self.rows if slot < self.packed else self._capacity)
        with self._on_host():
            return all(finite(flat[start:end]).all() for flat in self._flat.values())

    def clear(self, slot: int) -> None:
        """Leave no NaN where no slot has rows: a later one may read it behind its own, masked.

        Only blocks that have some are written to, so that the others go on taking no memory.
        """
        self._unpack(0)
        self._parked[slot] = 0
        starts = [b * self._capacity for b in range(self._batch)]
        with self._on_host():
            for flat in self._flat.values():
                for start, rows in zip(starts, self._parked, strict=True):
                    for at in range(start + rows, start + self._capacity, ROW_STEP):
                        block = flat[at : min(at + ROW_STEP, start + self._capacity)]
                        if not finite(block).all():
                            block[~finite(block)] = 0

    def rows_of(self, slot: int, start: int, stop: int) -> dict[str, NDArray[Any]]:
        """Copy rows start .. stop - 1 of a slot."""
        at = self.start(slot)
        return {name: flat[at + start : at + stop].copy() for name, flat in self._flat.items()}

    def fill(self, slot: int, pieces: Sequence[tuple[Mapping[str, Any], int, int]]) -> None:
        """Park a slot, whose first rows become so many of each piece from its first one on."""
        self.park(slot, sum(count for _, _, count in pieces))
        start = self.start(slot)
        for arrays, first, count in pieces:
            for name, flat in self._flat.items():
                flat[start : start + count] = arrays[name][first : first + count]
            start += count

    def swap(self, first: int, second: int) -> None:
        low, high = sorted((first, second))
        rows = self.rows
        if high >= self.packed:
            self._unpack(low)
            rows = max(self._parked[first], self._parked[second])
        with self._on_host():
            for flat in self._flat.values():
                a, b = (flat[self.start(s) : self.start(s) + rows] for s in (first, second))
                held = a.copy()
                a[:], b[:] = b, held
        parked = self._parked
        parked[first], parked[second] = parked[second], parked[first]

    def _lay_out(self, rows: int) -> None:
        """Change the number of rows that packed slots have; until the next step none is."""
        self._unpack(0)
        self._give_back()
        self.rows = rows

    def _unpack(self, first: int) -> None:
        """Park the packed slots from `first` on."""
        slots = range(first, self.packed)
        for slot in slots:
            self._parked[slot] = self.rows
        # Downwards: a slot's rows move up, where only slots are that have moved already.
        places = [(slot * self.rows, slot * self._capacity) for slot in reversed(slots)]
        self._relocate(places, self.rows)
        self.packed = min(self.packed, first)

    def _relocate(self, places: Sequence[tuple[int, int]], rows: int) -> None:
        """Copy so many rows from one place to another, pair by pair."""
        if moved := [(old, new) for old, new in places if old != new]:
            with self._on_host():
                for flat in self._flat.values():
                    for old, new in moved:
                        flat[new : new + rows] = flat[old : old + rows]

    def _give_back(self) -> None:
        """Free the memory of large caches between the packed slots and the parked ones."""
        self._reserved = min(self._reserved, self.packed * self.rows)
        start = self.packed * self.rows
        for slot in range(self.packed, self._batch + 1):
            for pages in self._large:
                pages.give_back(start, slot * self._capacity)
            if slot < self._batch:
                start = slot * self._capacity + rounded(self._parked[slot], self._capacity)

    def _on_host(self) -> contextlib.AbstractContextManager[None]:
        """While rows are copied in the host's arrays."""
        return contextlib.nullcontext()

    def _reserve(self, rows: int) -> None:
        """Write to memory that no step has reached, a block at a time, and change nothing.

        Else the system would find a page for each cache whenever a step first writes to one, all
        threads waiting: up to 1 ms, every 13 tokens of deepseek-tiny.
        """
        if rows > self._reserved:
            for flat in self._flat.values():
                flat[self._reserved : rows] += 0
            self._reserved = rows
