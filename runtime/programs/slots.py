"""Slots: caches, carried state and the requests' controls, in any kind of memory."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mtpbuild.runtime.contract.controls import (
    ALLOWED,
    CONSTRAINED,
    GREEDY,
    HISTORY,
    StepControls,
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
JUDGED = ("window", "num_drafts")  # the parts of a step's input state that its output reports
Array: TypeAlias = Any  # of NumPy, of torch, or a `DeviceArray`: `array[first:last]` is a view


def finite(numbers: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which numbers are neither NaN nor infinite; uint16 is taken as bfloat16's bits."""
    if numbers.dtype == np.uint16:
        return (numbers & 0x7F80) != 0x7F80
    return np.isfinite(numbers)


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


class Caches:
    """All slots' caches [B, 1, S, C] at full capacity; a step decides which rows it reads."""

    def __init__(self, state: Sequence[StateSpec], memory: Memory) -> None:
        specs = [s for s in state if s.role == "rows"]
        self._memory = memory
        self.tensors = {s.name: memory.zeros(s.shape, s.dtype) for s in specs}
        self._dtypes = {s.name: s.dtype for s in specs}
        self._spare: dict[str, Array] = {}  # one slot's rows, while two slots are swapped

    def fit(self, rows: int) -> bool:
        """Make room for `rows` rows per slot; return whether the layout, so every view, changed."""
        return False

    def move(self, source: int, target: int, lengths: Array) -> None:
        """Copy the committed rows of slot `source`, `lengths[source]`, to slot `target`.

        This class copies all rows, since the host does not know the lengths on a GPU.
        """
        for array in self.tensors.values():
            self._memory.copy(array[source : source + 1], array[target : target + 1])

    def copy(self, source: int, slot: int, rows: int) -> None:
        """Copy the first `rows` rows of slot `source` to `slot`; this class copies all rows."""
        for array in self.tensors.values():
            self._memory.copy(array[source : source + 1], array[slot : slot + 1])

    def finite(self, slot: int, rows: int) -> bool:
        """Return whether a slot's first rows are finite."""
        own = (self._memory.host(array[slot : slot + 1]) for array in self.tensors.values())
        return all(finite(array[:, :, :rows]).all() for array in own)

    def clear(self, slot: int) -> None:
        """Set the slot's rows to zero."""
        for name, array in self.tensors.items():
            zeros = np.zeros((1, *array.shape[1:]), host_type(self._dtypes[name]))
            self._memory.copy(zeros, array[slot : slot + 1])

    def swap(self, first: int, second: int) -> None:
        """Swap the contents of two slots."""
        for name, array in self.tensors.items():
            one, other = array[first : first + 1], array[second : second + 1]
            if name not in self._spare:
                self._spare[name] = self._memory.zeros((1, *array.shape[1:]), self._dtypes[name])
            self._memory.copy(one, self._spare[name])
            self._memory.copy(other, one)
            self._memory.copy(self._spare[name], other)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return each cache [B, 1, rows, C] on the host; it shares memory if it is there."""
        return {name: self._memory.host(array) for name, array in self.tensors.items()}


class Slots:
    """The part of `Programs` that all targets share: state, `begin`, `move` and the like.

    copies: of the carried state; 2 for a target that reads one copy and writes the other.
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
        self._now = 0  # index of the copy that is read next
        # An engine may lack some controls, or have those of a rule that is not installed here.
        others = {"active", *(s.name for s in manifest.state)}
        asked = [t for t in manifest.programs[MIXED].inputs if t.name not in others]
        self._controls = self._zeros(asked)
        self._places = {
            t.name: (tuple(map(int, t.shape[1:])), t.dtype) for t in asked if t.name not in MASKS
        }
        self._active = memory.zeros((self._batch,), "bool")
        self._mixed = np.zeros(self._batch, np.bool_)  # slots that need the mixed program
        self._bindings: dict[Any, Any] = {}  # programs' inputs; cleared when the layout changes
        self._most = self._nextn = manifest.build.nextn

    @property
    def state(self) -> dict[str, NDArray[Any]]:
        """The state tensors on the host, for tests and tools; caches have the rows in use."""
        carries = self._carries[self._now].items()
        return self._caches.arrays() | {name: self._memory.host(array) for name, array in carries}

    def begin(self, slot: int, length: int, newest: int, controls: StepControls = GREEDY) -> None:
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
        """Copy a slot's carried state and controls to another slot."""
        carries = self._carries[self._now]
        for held in (*self._carries, self._controls):
            for name, array in held.items():
                given = carries.get(name, array)[source : source + 1]
                self._memory.copy(given, array[target : target + 1])
        self._mixed[target] = self._mixed[source]

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

        The number is not rounded up to 1, 2, 4, 8: unless programs are compiled or tuned for a
        shape, another slot would only cost time.
        """
        kind = MIXED if (mixed & active).any() else PLAIN
        program = program_name(kind, self._nextn, self._most)
        return program, len(active) - int(active[::-1].argmax())

    def _zeros(self, tensors: Iterable[TensorSpec]) -> dict[str, Array]:
        """Allocate a step's tensors for all slots."""
        shapes = ((t, (self._batch, *map(int, t.shape[1:]))) for t in tensors)
        return {t.name: self._memory.zeros(shape, t.dtype) for t, shape in shapes}

    def _prompt_inputs(self, start: int, tokens: Ints) -> dict[str, NDArray[Any]]:
        """Return prefill's inputs from the host: a chunk, the tokens after it, and its start."""
        chunk = len(tokens) - self.lookahead
        given = {"tokens": tokens[None, :chunk], "ahead": tokens[None, chunk:]}
        return given | {"start": np.array([start], np.int64)}


def own_outputs(program: ProgramSpec) -> list[TensorSpec]:
    """Return a program's outputs without those of the state."""
    return [t for t in program.outputs if not t.name.endswith(".out")]


def reported(arrays: Mapping[str, NDArray[Any]], slots: int) -> StepOutput:
    """Return the output of a step of the first `slots` slots; the others emit nothing."""
    arrays["tokens"][slots:], arrays["num_tokens"][slots:] = -1, 0
    return StepOutput(**arrays)
