"""Slots hold caches, carried state and what their requests ask for, in any kind of memory."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mtpbuild.runtime.contract.controls import (
    ALLOWED,
    CONSTRAINED,
    GREEDY,
    HISTORY,
    Controls,
)
from mtpbuild.runtime.contract.manifest import Manifest, ProgramSpec, TensorSpec
from mtpbuild.runtime.contract.programs import (
    MIXED,
    PLAIN,
    Bools,
    Ints,
    StepOutput,
    host_type,
    program_name,
)
from mtpbuild.runtime.contract.state import StateSpec
from mtpbuild.runtime.errors import EngineError

MASKS = (CONSTRAINED, ALLOWED)
JUDGED = ("window", "num_drafts")  # of the state that a step was given, what it reports
Array: TypeAlias = Any  # of NumPy, of torch, or a `DeviceArray`: `array[first:last]` is a view


def finite(numbers: NDArray[Any]) -> NDArray[np.bool_]:
    """Say which numbers are neither NaN nor infinite; bfloat16 is held as bits."""
    if numbers.dtype == np.uint16:
        return (numbers & 0x7F80) != 0x7F80
    return np.isfinite(numbers)


class Memory(Protocol):
    """Declares memory that holds state: the host's, or a GPU's as torch or CUDA see it."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Allocate; `dtype` is spelled as in a manifest."""
        ...

    def copy(self, source: Array, target: Array) -> None:
        """Copy between equal shapes; the source may lie on the host, wherever the target is."""

    def host(self, array: Array) -> NDArray[Any]:
        """Show tests and tools the array: itself if it is the host's, else a copy."""
        ...


class Caches:
    """Holds all slots' caches [B, 1, S, C] at full capacity: a step decides what it reads."""

    def __init__(self, state: Sequence[StateSpec], memory: Memory) -> None:
        specs = [s for s in state if s.role == "rows"]
        self._memory = memory
        self.tensors = {s.name: memory.zeros(s.shape, s.dtype) for s in specs}
        self._dtypes = {s.name: s.dtype for s in specs}
        self._spare: dict[str, Array] = {}  # a slot's rows, while two are exchanged

    def fit(self, rows: int) -> bool:
        """Make room for `rows` rows per slot; True if the layout, and so every view, changed."""
        return False

    def move(self, source: int, target: int, lengths: Array) -> None:
        """Copy the committed rows of slot `source`, `lengths[source]`, to slot `target`.

        Here all rows: the host does not know a GPU's lengths.
        """
        for array in self.tensors.values():
            self._memory.copy(array[source : source + 1], array[target : target + 1])

    def copy(self, source: int, slot: int, rows: int) -> None:
        """Make the first rows of `slot` those of slot `source`. Here all rows."""
        for array in self.tensors.values():
            self._memory.copy(array[source : source + 1], array[slot : slot + 1])

    def finite(self, slot: int, rows: int) -> bool:
        """Tell whether a slot's first rows are finite."""
        own = (self._memory.host(array[slot : slot + 1]) for array in self.tensors.values())
        return all(finite(array[:, :, :rows]).all() for array in own)

    def clear(self, slot: int) -> None:
        """Make the slot's rows zeros."""
        for name, array in self.tensors.items():
            zeros = np.zeros((1, *array.shape[1:]), host_type(self._dtypes[name]))
            self._memory.copy(zeros, array[slot : slot + 1])

    def swap(self, first: int, second: int) -> None:
        """Exchange what two slots hold."""
        for name, array in self.tensors.items():
            one, other = array[first : first + 1], array[second : second + 1]
            if name not in self._spare:
                self._spare[name] = self._memory.zeros((1, *array.shape[1:]), self._dtypes[name])
            self._memory.copy(one, self._spare[name])
            self._memory.copy(other, one)
            self._memory.copy(self._spare[name], other)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Returns each cache [B, 1, rows, C] on the host; sharing memory if it is there."""
        return {name: self._memory.host(array) for name, array in self.tensors.items()}


class Slots:
    """Is the part of `Programs` that is the same on all targets: state, `begin` and `move`.

    copies: of the carried state; 2 for a target that reads one and writes the other.
    """

    def __init__(self, manifest: Manifest, memory: Memory, caches: Caches, copies: int = 1) -> None:
        self.lookahead, self._programs = manifest.lookahead, manifest.programs
        self.features = manifest.features
        self._memory, self._caches = memory, caches
        self._batch, self._capacity = manifest.build.max_batch, manifest.build.capacity
        carried = {s.name: (s.shape, s.dtype) for s in manifest.state if s.role != "rows"}
        self._carried = carried
        self._recurrent = [s.name for s in manifest.state if s.role == "recurrent"]
        self._carries = [
            {name: memory.zeros(*kind) for name, kind in carried.items()} for _ in range(copies)
        ]
        self._now = 0  # the copy that is read next
        # An engine may lack some of our controls, and may have a rule that is not installed here.
        others = {"active", *(s.name for s in manifest.state)}
        asked = [t for t in manifest.programs[MIXED].inputs if t.name not in others]
        self._controls = self._zeros(asked)
        self._places = {
            t.name: (tuple(map(int, t.shape[1:])), t.dtype) for t in asked if t.name not in MASKS
        }
        self._active = memory.zeros((self._batch,), "bool")
        self._mixed = np.zeros(self._batch, np.bool_)  # slots that the plain program can't serve
        self._bindings: dict[Any, Any] = {}  # what programs were given; forgotten with the layout
        self._most = self._nextn = manifest.build.nextn

    @property
    def state(self) -> dict[str, NDArray[Any]]:
        """Shows the state tensors as they are, to tests and tools; caches show the rows in use."""
        carries = self._carries[self._now].items()
        return self._caches.arrays() | {name: self._memory.host(array) for name, array in carries}

    def begin(self, slot: int, length: int, newest: int, controls: Controls = GREEDY) -> None:
        first: dict[str, int | tuple[int, ...]]
        first = {"lengths": length, "window": newest, "num_drafts": 0}
        first |= {"thinking": controls.thinking}
        if controls.history:
            first |= {HISTORY: controls.history}
        for name, value in first.items():
            row = np.zeros((1, *self._carries[0][name].shape[1:]), np.asarray(value).dtype)
            row.flat[: np.size(value)] = value
            for copy in self._carries:
                self._memory.copy(row, copy[name][slot : slot + 1])
        for name, row in controls.rows(self._places):  # a plain slot may share a mixed step
            self._memory.copy(row[None], self._controls[name][slot : slot + 1])
        if CONSTRAINED in self._controls:
            constrained = np.array([controls.constrained])
            self._memory.copy(constrained, self._controls[CONSTRAINED][slot : slot + 1])
        self._mixed[slot] = not controls.plain

    def move(self, source: int, target: int) -> None:
        self._caches.move(source, target, self._carries[self._now]["lengths"])
        self._carry(source, target)

    def finite(self, slot: int, rows: int) -> bool:
        carries = self._carries[self._now]
        own = (self._memory.host(carries[name][slot : slot + 1]) for name in self._recurrent)
        return self._caches.finite(slot, rows) and all(finite(array).all() for array in own)

    def clear(self, slot: int) -> None:
        self._caches.clear(slot)
        for name, (shape, dtype) in self._carried.items():
            zeros = np.zeros((1, *shape[1:]), host_type(dtype))
            for copy in self._carries:
                self._memory.copy(zeros, copy[name][slot : slot + 1])

    def copy(self, source: int, target: int, rows: int) -> None:
        self._caches.copy(source, target, rows)

    def swap(self, source: int, target: int) -> None:
        self._caches.swap(source, target)
        self._carry(source, target)

    def _carry(self, source: int, target: int) -> None:
        """Copy all that a slot has besides its caches."""
        carries = self._carries[self._now]
        for held in (*self._carries, self._controls):
            for name, array in held.items():
                given = carries.get(name, array)[source : source + 1]
                self._memory.copy(given, array[target : target + 1])
        self._mixed[target] = self._mixed[source]

    def draft(self, nextn: int) -> None:
        self._nextn = nextn

    def _fit(self, rows: int) -> None:
        """Let every slot have so many rows."""
        if rows > self._capacity:
            raise EngineError(f"internal: {rows} cache rows asked for, {self._capacity} allocated")
        if self._caches.fit(rows):
            self._bindings.clear()

    def _choose(self, active: Bools, mixed: Bools) -> tuple[str, int]:
        """Returns the program of a step, and how many slots it computes: up to the last active one.

        Exactly so many, not in buckets of 1, 2, 4, 8: where nothing is compiled or tuned for a
        shape, a slot more would only cost its computation.
        """
        kind = MIXED if (mixed & active).any() else PLAIN
        program = program_name(kind, self._nextn, self._most)
        return program, len(active) - int(active[::-1].argmax())

    def _zeros(self, tensors: Iterable[TensorSpec]) -> dict[str, Array]:
        """Tensors of a step for all slots, whatever number of them it takes."""
        shapes = ((t, (self._batch, *map(int, t.shape[1:]))) for t in tensors)
        return {t.name: self._memory.zeros(shape, t.dtype) for t, shape in shapes}

    def _prompt_inputs(self, start: int, tokens: Ints) -> dict[str, NDArray[Any]]:
        """Makes the host's share of prefill's inputs: a chunk, what is behind it, its beginning."""
        chunk = len(tokens) - self.lookahead
        given = {"tokens": tokens[None, :chunk], "ahead": tokens[None, chunk:]}
        return given | {"start": np.array([start], np.int64)}


def own_outputs(program: ProgramSpec) -> list[TensorSpec]:
    """Returns a program's outputs but the state."""
    return [t for t in program.outputs if not t.name.endswith(".out")]


def reported(arrays: Mapping[str, NDArray[Any]], slots: int) -> StepOutput:
    """Returns a step of the first slots; the others emit nothing."""
    arrays["tokens"][slots:], arrays["num_tokens"][slots:] = -1, 0
    return StepOutput(**arrays)
