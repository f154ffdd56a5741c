"""Slots: the caches, carried state and controls of requests, in any kind of memory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mtpbuild.runtime.contract.controls import ALLOWED, GREEDY, HISTORY, StepControls
from mtpbuild.runtime.contract.manifest import Manifest, ProgramSpec, TensorSpec
from mtpbuild.runtime.contract.programs import (
    MIXED,
    NO_VALUE,
    PLAIN,
    Bools,
    Ints,
    Piece,
    StepOutput,
    host_type,
    name_program,
)
from mtpbuild.runtime.contract.state import BLOCK, CACHED, StateSpec
from mtpbuild.runtime.errors import EngineError

JUDGED = ("window", "num_drafts")  # states from before a step that its output reports
Arrays: TypeAlias = dict[str, NDArray[Any]]  # on the host, by name
Array: TypeAlias = Any  # of NumPy, of torch, or a `DeviceArray`: `array[first:last]` is a view


def finite(numbers: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which numbers are neither NaN nor infinite; uint16 is taken as bfloat16's bits.

    A row in int8 that was made from other numbers has no value at all.
    """
    if numbers.dtype == np.int8:
        return np.broadcast_to(numbers[..., :1] != NO_VALUE, numbers.shape)
    if numbers.dtype == np.uint16:
        return (numbers & 0x7F80) != 0x7F80
    return np.isfinite(numbers)


def are_all_finite(arrays: Mapping[str, NDArray[Any]]) -> bool:
    return all(finite(array).all() for array in arrays.values())


class Memory(Protocol):
    """The memory that holds state: the host's, or a GPU's through torch or CUDA."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Allocate zeros; `dtype` is spelled as in a manifest."""
        ...

    def copy(self, source: Array, target: Array) -> None:
        """Copy between equal shapes; the source may be on the host, wherever the target is."""

    def host(self, array: Array) -> NDArray[Any]:
        """Return the array on the host: itself if it is there already, else a copy."""
        ...


def list_rings(state: Iterable[StateSpec]) -> dict[str, int]:
    """Return the number of rows of each ring, by the state's name."""
    return {s.name: s.sizes["rows"] for s in state if s.role == "window"}


class Caches:
    """All slots' caches [B, 1, S, C] at full capacity; a step decides which rows it reads."""

    def __init__(self, state: Sequence[StateSpec], memory: Memory) -> None:
        specs = [s for s in state if s.role in CACHED]
        self._memory, self.specs = memory, specs
        self._rings = list_rings(state)
        self._window = next((s.sizes["window"] for s in state if s.name == "window"), 0)
        self._capacity = max((s.sizes["rows"] for s in specs if s.role == "rows"), default=0)
        self._flat = {
            s.name: memory.zeros((s.sizes["batch"] * s.sizes["rows"], s.sizes["width"]), s.dtype)
            for s in specs
        }
        self.tensors = {s.name: self._flat[s.name].reshape(s.shape) for s in specs}

    def fit(self, rows: int) -> bool:
        """Make room for `rows` rows per slot; return whether all views have become invalid."""
        return False

    def move(self, source: int, target: int, lengths: Array) -> None:
        """Copy the committed rows of slot `source`, `lengths[source]`, to slot `target`.

        This class copies all rows, since the host does not know the lengths on a GPU.
        """
        for array in self.tensors.values():
            self._memory.copy(array[source : source + 1], array[target : target + 1])

    def start(self, slot: int, name: str) -> int:
        """Return the row at which a slot begins in a cache's allocation."""
        return slot * self._rings.get(name, self._capacity)

    def _cut(self, slot: int, name: str, start: int, stop: int) -> Iterator[tuple[Any, slice]]:
        """Yield views of a slot's rows of some positions, and where each lies among them.

        A ring has the last of them alone.
        """
        at, flat, ring = self.start(slot, name), self._flat[name], self._rings.get(name)
        first = start if ring is None else max(start, stop - ring)
        while first < stop:
            place = first if ring is None else first % ring
            count = stop - first if ring is None else min(stop - first, ring - place)
            yield flat[at + place : at + place + count], slice(first - start, first - start + count)
            first += count

    def read(self, slot: int, start: int, stop: int) -> Arrays:
        """Return rows of a slot on the host; they may share its memory if it is there."""
        rows = dict[str, NDArray[Any]]()
        for name, flat in self._flat.items():
            views = [view for view, _ in self._cut(slot, name, start, stop)] or [flat[:0]]
            parts = [*map(self._memory.host, views)]
            rows[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return rows

    def holds(self, start: int, stop: int) -> bool:
        """Return whether rows of these positions, of which the last are new, are in all rings."""
        newer = BLOCK + 2 * self._window
        rings = (ring for ring in self._rings.values() if ring < self._capacity)
        return all(stop - start + newer <= ring for ring in rings)

    def write(self, slot: int, pieces: Sequence[tuple[Mapping[str, Any], int]]) -> None:
        """Write a slot's first rows, piece by piece: arrays, and how many rows to take."""
        at = 0
        for arrays, count in pieces:
            for name in self._flat:
                for view, rows in self._cut(slot, name, at, at + count):
                    self._memory.copy(arrays[name][rows], view)
            at += count

    def clear(self, slot: int) -> None:
        """Set the slot's rows to zero."""
        for s in self.specs:
            zeros = np.zeros((1, *s.shape[1:]), host_type(s.dtype))
            self._memory.copy(zeros, self.tensors[s.name][slot : slot + 1])

    def arrays(self) -> Arrays:
        """Return each cache [B, 1, rows, C] on the host; it shares memory if it is there."""
        return {name: self._memory.host(array) for name, array in self.tensors.items()}


class Slots:
    """The part of `Programs` that all targets share: state, `begin`, `move` and the like.

    copies: copies of the carried state; 2 for a target that reads one and writes the other.
    """

    def __init__(self, manifest: Manifest, memory: Memory, caches: Caches, copies: int = 1) -> None:
        self.lookahead, self._programs = manifest.lookahead, manifest.programs
        self.features = manifest.features
        self._memory, self._caches = memory, caches
        self._batch, self._capacity = manifest.build.max_batch, manifest.build.capacity
        self._carried = [s for s in manifest.state if s.role not in CACHED]
        self._carries = [
            {s.name: memory.zeros(s.shape, s.dtype) for s in self._carried} for _ in range(copies)
        ]
        self._now = 0  # index of the copy that is read next
        # An engine may lack some controls, or have those of a rule that is not installed here.
        others = {"active", *(s.name for s in manifest.state)}
        controls = [t for t in manifest.programs[MIXED].inputs if t.name not in others]
        self._controls = self._allocate_zeros(controls)
        self._places = {
            t.name: (tuple(map(int, t.shape[1:])), t.dtype) for t in controls if t.name != ALLOWED
        }
        self._active = memory.zeros((self._batch,), "bool")
        self._mixed = np.zeros(self._batch, np.bool_)  # slots that need the mixed program
        self._bindings: dict[Any, Any] = {}  # programs' inputs; cleared when the layout changes
        self._max_nextn = self._nextn = manifest.build.nextn
        self._saved: dict[int, Mapping[str, NDArray[Any]]] = {}  # for the prefix cache
        # The newest tokens of each slot that its drafter has missed, each with its hidden state.
        self._missed: list[list[tuple[int, Any]]] = [[] for _ in range(self._batch)]

    @property
    def state(self) -> Arrays:
        """The state tensors on the host, for tests and tools; caches have the rows in use."""
        carries = self._carries[self._now].items()
        return self._caches.arrays() | {name: self._memory.host(array) for name, array in carries}

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        raise NotImplementedError

    def begin(self, slot: int, length: int, newest: int, controls: StepControls = GREEDY) -> None:
        self._missed[slot] = []
        values: dict[str, Any] = {"lengths": length, "window": newest, "num_drafts": 0}
        values["thinking"] = controls.thinking
        if controls.history:
            values[HISTORY] = controls.history
        for name, value in values.items():
            row = np.zeros((1, *self._carries[0][name].shape[1:]), np.asarray(value).dtype)
            row.flat[: np.size(value)] = value
            self._set_carry(name, slot, row)
        for name, row in controls.rows(self._places):  # also if plain: its step may be mixed
            self._memory.copy(row[None], self._controls[name][slot : slot + 1])
        self._mixed[slot] = not controls.plain

    def move(self, source: int, target: int) -> None:
        self._caches.move(source, target, self._carries[self._now]["lengths"])
        self._carry(source, target)

    def finite(self, slot: int, rows: int) -> bool:
        self._settle()
        return are_all_finite(self._caches.read(slot, 0, rows)) and are_all_finite(
            self._copy_states(slot)
        )

    def clear(self, slot: int) -> None:
        self._caches.clear(slot)
        for s in self._carried:
            self._set_carry(s.name, slot, np.zeros((1, *s.shape[1:]), host_type(s.dtype)))

    def save_rows(self, slot: int, start: int, pieces: Sequence[Piece]) -> bool:
        at, saved = 0, dict[int, Mapping[str, NDArray[Any]]]()
        stop = start + sum(count for _, count in pieces)
        if not self._caches.holds(start, stop):
            return False
        self._settle()
        rows = self._caches.read(slot, start, stop)
        for number, count in pieces:
            saved[number] = {name: array[at : at + count].copy() for name, array in rows.items()}
            if not are_all_finite(saved[number]):
                return False
            at += count
        self._saved |= saved
        return True

    def save_states(self, slot: int, number: int) -> bool:
        self._settle()
        states = {name: array.copy() for name, array in self._copy_states(slot).items()}
        if finite := are_all_finite(states):
            self._saved[number] = states
        return finite

    def load_rows(self, slot: int, pieces: Sequence[Piece]) -> None:
        self._missed[slot] = []
        self._caches.write(slot, [(self._saved[number], count) for number, count in pieces])

    def load_states(self, slot: int, number: int) -> None:
        for name, array in self._saved[number].items():
            self._set_carry(name, slot, array[None])

    def discard(self, number: int) -> None:
        self._saved.pop(number, None)

    def saved(self, number: int) -> Mapping[str, NDArray[Any]]:
        return self._saved[number]

    def adopt(self, number: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._saved[number] = arrays

    def _settle(self) -> None:
        """Wait for queued work whose results the host is about to read."""

    def _copy_states(self, slot: int) -> Arrays:
        """Return a slot's recurrent states on the host."""
        names = [s.name for s in self._carried if s.role == "recurrent"]
        arrays = ((name, self._carries[self._now][name][slot : slot + 1]) for name in names)
        return {name: self._memory.host(array)[0] for name, array in arrays}

    def _set_carry(self, name: str, slot: int, row: NDArray[Any]) -> None:
        """Write a slot's row [1, ..] to all copies of a carried state."""
        for copy in self._carries:
            self._memory.copy(row, copy[name][slot : slot + 1])

    def _carry(self, source: int, target: int) -> None:
        """Copy a slot's carried state and controls to another slot."""
        carries = self._carries[self._now]
        for held in (*self._carries, self._controls):
            for name, array in held.items():
                row = carries.get(name, array)[source : source + 1]
                self._memory.copy(row, array[target : target + 1])
        self._mixed[target], self._missed[target] = self._mixed[source], self._missed[source]

    def draft(self, nextn: int) -> None:
        self._nextn = nextn

    def _fit(self, rows: int) -> None:
        """Make room for `rows` rows in every slot."""
        if rows > self._capacity:
            raise EngineError(f"internal: {rows} cache rows asked for, {self._capacity} allocated")
        if self._caches.fit(rows):
            self._bindings.clear()

    def _choose(self, active: Bools, mixed: Bools) -> tuple[str, int]:
        """Return the program of a step, and the number of slots up to the last active one.

        The number is not rounded up to 1, 2, 4, 8 here: only targets that prepare a program for
        each number of slots gain from that.
        """
        kind = MIXED if (mixed & active).any() else PLAIN
        program = name_program(kind, self._nextn, self._max_nextn)
        return program, len(active) - int(active[::-1].argmax())

    def _allocate_zeros(self, tensors: Iterable[TensorSpec]) -> dict[str, Array]:
        """Allocate a step's tensors for all slots."""
        shapes = ((t, (self._batch, *map(int, t.shape[1:]))) for t in tensors)
        return {t.name: self._memory.zeros(shape, t.dtype) for t, shape in shapes}

    def _make_prompt_inputs(self, start: int, tokens: Ints) -> Arrays:
        """Return prefill's inputs from the host: a chunk, the tokens after it, and its start."""
        chunk = len(tokens) - self.lookahead
        inputs = {"tokens": tokens[None, :chunk], "ahead": tokens[None, chunk:]}
        return inputs | {"start": np.array([start], np.int64)}


def list_result_specs(program: ProgramSpec) -> list[TensorSpec]:
    """Return a program's outputs without those of the state."""
    return [t for t in program.outputs if not t.name.endswith(".out")]


def name_outputs(state: Mapping[str, Array]) -> dict[str, Array]:
    """Return state by the names of the outputs that have its new values."""
    return {f"{name}.out": array for name, array in state.items()}


def make_step_output(arrays: Mapping[str, NDArray[Any]], slots: int) -> StepOutput:
    """Return the output of a step of the first `slots` slots; the others emit nothing."""
    arrays["tokens"][slots:], arrays["num_tokens"][slots:] = -1, 0
    return StepOutput(**arrays)
