"""Slots in the host's memory, with caches laid out for the rows in use."""

import contextlib
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtpbuild.runtime.contract.controls import ALLOWED
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import (
    FILL_DRAFTER,
    HIDDEN,
    PREFILL,
    SCORE,
    Bools,
    Constraint,
    Ints,
    Piece,
    Scores,
    host_type,
)
from mtpbuild.runtime.contract.state import CACHED, StateSpec
from mtpbuild.runtime.errors import running_program
from mtpbuild.runtime.programs.mapped_weights import allocate
from mtpbuild.runtime.programs.slots import (
    Arrays,
    Caches,
    Slots,
    finite,
    list_result_specs,
    list_rings,
)

ROW_STEP = 128  # programs get caches with a multiple of this many rows
GROWTH = 1.25  # with several slots: factor by which the rows grow once a slot needs more
LARGE = 1 << 24  # bytes from which a cache returns unused memory to the system
FILLING = (PREFILL, SCORE, FILL_DRAFTER)  # programs that run on a chunk of tokens
# Tokens that a drafter misses at most before it is given them. So steps without drafts read its
# module's weights once in so many tokens.
MAX_MISSED = 32


class HostMemory:
    """The host's memory as NumPy arrays; bfloat16 is held as bits."""

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
        self._outputs = {
            name: self._allocate_zeros(list_result_specs(program))
            for name, program in manifest.programs.items()
            if name not in FILLING
        }
        self._most_missed = min(MAX_MISSED, manifest.build.prefill_chunk)

    def drafts(self, slot: int) -> list[int]:
        carries = self._carries[self._now]
        drafts: list[int] = carries["window"][slot, 1 : 1 + carries["num_drafts"][slot]].tolist()
        return drafts

    def propose(self, slot: int, drafts: Sequence[int], kept: int = 0) -> None:
        """Replace a slot's pending drafts after the first `kept` ones.

        A replaced draft gets probability 1 in its row of `draft_probs`.
        """
        carries, count = self._carries[self._now], len(drafts)
        carries["num_drafts"][slot] = count
        carries["window"][slot, 1 + kept : 1 + count] = drafts[kept:]
        for k in range(kept, count):
            carries["draft_probs"][slot, k] = 0
            carries["draft_probs"][slot, k, drafts[k]] = 1

    def constrain(self, slot: int, constraint: Constraint) -> None:
        """Set a slot's token mask, and its drafts."""
        self._controls[ALLOWED][slot] = constraint.allowed
        self.propose(slot, constraint.drafts, constraint.kept)

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        self._run_chunk(PREFILL, slot, self._begin_chunk(slot, start, tokens))

    def score(self, slot: int, start: int, tokens: Ints, following: Ints) -> Scores:
        inputs = self._begin_chunk(slot, start, tokens) | {"following": following[None]}
        outputs = self._run_chunk(SCORE, slot, inputs)
        return Scores(**{name: array[0] for name, array in outputs.items()})

    def save_rows(self, slot: int, start: int, pieces: Sequence[Piece]) -> bool:
        self._fill_drafter(slot)
        return super().save_rows(slot, start, pieces)

    def _begin_chunk(self, slot: int, start: int, tokens: Ints) -> Arrays:
        """Lay out a slot for a chunk of its prompt; return the inputs of the chunk's program."""
        self._missed[slot] = []
        self._caches.park(slot, start + len(tokens) - self.lookahead)
        return self._make_prompt_inputs(start, tokens)

    def _fill_drafter(self, slot: int) -> None:
        """Give a slot's drafter the tokens that it has missed."""
        if missed := self._missed[slot]:
            carries = self._carries[self._now]
            tokens = np.array([*(token for token, _ in missed), carries["window"][slot, 0]])
            inputs = self._make_prompt_inputs(carries["lengths"][slot] - len(missed), tokens)
            hidden = np.stack([hidden for _, hidden in missed])[None]
            with running_program():  # also in `save_rows`
                self._run_chunk(FILL_DRAFTER, slot, inputs | {HIDDEN: hidden})
            self._missed[slot] = []

    def _run_chunk(self, program: str, slot: int, inputs: Arrays) -> Arrays:
        """Run a program on a chunk of a prompt; the next run may overwrite the returned outputs."""
        raise NotImplementedError

    def _begin_step(self, active: Bools, rows: int) -> tuple[str, int]:
        """Lay out a step's slots; return its program and the number of slots it computes."""
        self._fit(rows)
        self._active[:] = active
        program, slots = self._choose(active, self._mixed)
        self._caches.pack(slots)
        for slot, missed in enumerate(self._missed):
            if missed and active[slot] and (self._nextn or len(missed) == self._most_missed):
                self._fill_drafter(slot)
        return program, slots


def round_up_rows(rows: int, capacity: int) -> int:
    """Round rows up to a multiple of ROW_STEP, at most `capacity`."""
    return min(-(-rows // ROW_STEP) * ROW_STEP, capacity)


class Pages:
    """Zeros [rows, width] whose memory is allocated by writes and can be given back."""

    def __init__(self, shape: tuple[int, int], dtype: str) -> None:
        kind = np.dtype(host_type(dtype))
        self._row = shape[1] * kind.itemsize
        self._memory = allocate(shape[0] * self._row)
        self.array = np.frombuffer(self._memory, kind).reshape(shape)

    def give_back(self, start: int, end: int) -> None:
        """Free the whole pages in rows `start` to `end`, which then read as zeros."""
        first = -(-start * self._row // mmap.PAGESIZE) * mmap.PAGESIZE
        length = end * self._row // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, first, length)


class PackedCaches(Caches):
    """Caches [B, 1, S, C] laid out for the rows in use, so that a step reads only those.

    Graphs take contiguous tensors. An allocation has B * S rows. The first `packed` slots, which
    steps compute, are packed: their first `rows` rows are adjacent at the beginning of the
    allocation. The other slots are parked: slot b has the S rows from b * S on, which no step and
    no other prompt writes to. A large cache frees the memory of rows that belong to neither.
    """

    device = "cpu"

    def __init__(self, state: Sequence[StateSpec]) -> None:
        specs, self._memory = [s for s in state if s.role in CACHED], HostMemory()
        self._rings = list_rings(state)
        self._window = next((s.sizes["window"] for s in state if s.name == "window"), 0)
        self._batch = max(s.sizes["batch"] for s in specs)
        self._capacity = max(s.sizes["rows"] for s in specs if s.role == "rows")
        self.rows = self.packed = 0
        self._parked = [0] * self._batch  # rows in use of each parked slot
        self._reserved = 0  # rows at the beginning of an allocation that have been written to
        # Zeros, not uninitialised memory: NaN stays NaN by a masked row's weight, 0 or 1e-32.
        flat = ((s, (self._batch * s.sizes["rows"], s.sizes["width"])) for s in specs)
        pages = {s.name: Pages(shape, s.dtype) for s, shape in flat}
        self._flat = {name: held.array for name, held in pages.items()}
        # All but rings, whose rows are all in use.
        self._packable = {n: array for n, array in self._flat.items() if n not in self._rings}
        self._large = [pages[n] for n, array in self._packable.items() if array.nbytes >= LARGE]

    def arrays(self) -> Arrays:
        """Pack all slots and return their caches."""
        rows = max(self.rows, *self._parked)
        if rows != self.rows:
            self._lay_out(rows)
        self.pack(self._batch)
        return self.views(0, self._batch)

    def views(self, first: int, count: int) -> Arrays:
        """Return views [count, 1, rows, C] of packed slots from `first` on, or of 1 parked slot."""
        packed = first < self.packed
        assert first + count <= self.packed if packed else count == 1
        in_use = self.rows if packed else round_up_rows(self._parked[first], self._capacity)
        views = Arrays()
        for name, flat in self._flat.items():
            rows, start = self._rings.get(name, in_use), self.start(first, name)
            views[name] = flat[start : start + count * rows].reshape(count, 1, rows, flat.shape[1])
        return views

    def start(self, slot: int, name: str) -> int:
        return slot * self._rings.get(name, self._stride(slot))

    def _stride(self, slot: int) -> int:
        """Return the rows from a slot like this one to the next, but in rings."""
        return self.rows if slot < self.packed else self._capacity

    def pointers(self) -> dict[str, int]:
        """Return the address of each cache in the memory of `device`."""
        return {name: flat.ctypes.data for name, flat in self._flat.items()}

    def fit(self, rows: int) -> bool:
        wanted = round_up_rows(rows, self._capacity)
        if self._batch > 1:  # moving slots is expensive, so grow by more than needed, shrink late
            if wanted > self.rows:
                wanted = max(wanted, round_up_rows(int(GROWTH * self.rows), self._capacity))
            elif wanted * 2 > self.rows:
                wanted = self.rows
        if wanted == self.rows:
            return False
        self._lay_out(wanted)
        return True

    def pack(self, count: int) -> None:
        """Pack the first `count` slots for a step."""
        self._reserve(count * self.rows)
        if count <= self.packed:
            return
        # In ascending order, as rows move down over the old places of slots that have moved.
        self._relocate(
            [(b * self._capacity, b * self.rows) for b in range(self.packed, count)], self.rows
        )
        self.packed = count
        self._give_back()

    def park(self, slot: int, rows: int) -> None:
        """Park a slot, and the packed slots after it; the slot has `rows` rows in use."""
        self._unpack(slot)
        self._parked[slot] = rows

    def move(self, source: int, free: int, lengths: NDArray[Any]) -> None:
        if free < self.packed <= source:
            self._unpack(free)
        rows = int(lengths[source])
        places = source * self._stride(source), free * self._stride(free)
        self._relocate([places], rows)
        with self._on_host():
            for name, ring in self._rings.items():
                flat = self._flat[name]
                flat[free * ring : (free + 1) * ring] = flat[source * ring : (source + 1) * ring]
        self._parked[free] = rows

    def clear(self, slot: int) -> None:
        """Empty a slot; set NaNs outside all slots' rows to 0, as programs read masked rows too.

        Only blocks with NaNs are written to, so that the others still take no memory.
        """
        self._unpack(0)
        self._parked[slot] = 0
        starts = [b * self._capacity for b in range(self._batch)]
        with self._on_host():
            for name, ring in self._rings.items():
                self._flat[name][slot * ring : (slot + 1) * ring] = 0
            for flat in self._packable.values():
                for start, rows in zip(starts, self._parked, strict=True):
                    for at in range(start + rows, start + self._capacity, ROW_STEP):
                        block = flat[at : min(at + ROW_STEP, start + self._capacity)]
                        if not finite(block).all():
                            block[~finite(block)] = 0

    def write(self, slot: int, pieces: Sequence[tuple[Mapping[str, Any], int]]) -> None:
        self.park(slot, sum(count for _, count in pieces))
        with self._on_host():
            super().write(slot, pieces)

    def _lay_out(self, rows: int) -> None:
        """Change the number of rows of packed slots; all slots are parked until the next step."""
        self._unpack(0)
        self._give_back()
        self.rows = rows

    def _unpack(self, first: int) -> None:
        """Park the packed slots from `first` on."""
        slots = range(first, self.packed)
        for slot in slots:
            self._parked[slot] = self.rows
        # In descending order, as rows move up over the old places of slots that have moved.
        places = [(slot * self.rows, slot * self._capacity) for slot in reversed(slots)]
        self._relocate(places, self.rows)
        self.packed = min(self.packed, first)

    def _relocate(self, places: Sequence[tuple[int, int]], rows: int) -> None:
        """Copy `rows` rows from the first to the second place of each pair, in order."""
        if moved := [(old, new) for old, new in places if old != new]:
            with self._on_host():
                for flat in self._packable.values():
                    for old, new in moved:
                        flat[new : new + rows] = flat[old : old + rows]

    def _give_back(self) -> None:
        """Free the memory of large caches outside the rows of packed and parked slots."""
        self._reserved = min(self._reserved, self.packed * self.rows)
        start = self.packed * self.rows
        for slot in range(self.packed, self._batch + 1):
            for pages in self._large:
                pages.give_back(start, slot * self._capacity)
            if slot < self._batch:
                start = slot * self._capacity + round_up_rows(self._parked[slot], self._capacity)

    def _on_host(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the host's arrays are up to date and may be changed."""
        return contextlib.nullcontext()

    def _reserve(self, rows: int) -> None:
        """Touch the memory of rows that no step has written to, without changing them.

        Otherwise a step waits for page faults whenever it is the first to write to a page: up to
        1 ms, every 13 tokens of deepseek-tiny.
        """
        if rows > self._reserved:
            for flat in self._packable.values():
                flat[self._reserved : rows] += 0
            self._reserved = rows
