"""What B slots hold: caches, carried state and their requests' controls."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mtpbuild.runtime.controls import GREEDY, Controls
from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.manifest import Manifest, StateSpec, TensorSpec
from mtpbuild.runtime.programs.base import MIXED, PLAIN, Bools, host_type, program_name

ROW_STEP = 128  # a step's caches are given in multiples of this many rows


class Slots:
    """The part of `Programs` that is the same on several targets: state, `begin` and `move`.

    copies: of the carried state; 2 for a target that reads one and writes the other. caches: makes
    them from their specs, if they are not in the host's memory.
    """

    def __init__(
        self, manifest: Manifest, *, copies: int, caches: "MakeCaches | None" = None
    ) -> None:
        self.lookahead = manifest.lookahead
        self._caches = (caches or Caches)([s for s in manifest.state if s.kind == "cache"])
        carries = [s for s in manifest.state if s.kind == "carry"]
        self._carries = [
            {s.name: np.zeros(s.shape, host_type(s.dtype)) for s in carries} for _ in range(copies)
        ]
        self._now = 0  # the copy that is read next
        B = manifest.build.max_batch
        self._active = np.zeros(B, np.bool_)
        self._mixed = np.zeros(B, np.bool_)  # slots that the plain program can't serve
        self._controls = _controls(manifest)
        self._outputs = {
            name: _outputs(manifest, name) for name in manifest.programs if name != "prefill"
        }
        self._most = self._nextn = manifest.build.nextn

    @property
    def state(self) -> dict[str, NDArray[Any]]:
        """The state tensors as they are, for tests and tools; caches show the rows in use."""
        return self._caches.arrays() | self._carries[self._now]

    def begin(self, slot: int, length: int, newest: int, controls: Controls = GREEDY) -> None:
        for copy in self._carries:
            copy["lengths"][slot] = length
            copy["num_drafts"][slot] = 0
            copy["window"][slot] = 0
            copy["window"][slot, 0] = newest
            copy["thinking"][slot] = controls.thinking
        self._mixed[slot] = not controls.plain
        for name, array in self._controls.items():  # a plain slot may share a mixed step
            if name != "uniforms":
                array[slot] = padded(getattr(controls, name), array.shape[1:])
            elif not controls.plain:
                array[slot] = controls.uniforms(array.shape[2], array.shape[1])

    def move(self, source: int, target: int) -> None:
        carries = self._carries[self._now]
        self._caches.copy(source, target, int(carries["lengths"][source]))
        for name, array in carries.items():
            for copy in self._carries:
                copy[name][target] = array[source]
        for array in (*self._controls.values(), self._mixed):
            array[target] = array[source]

    def draft(self, nextn: int) -> None:
        self._nextn = nextn

    def _prefill_rows(self, end: int) -> int:
        """Rows to bind for a chunk up to position `end`; other slots may hold more."""
        return max(end, self._caches.rows if len(self._active) > 1 else 0)

    def _activate(self, active: Bools) -> tuple[str, int]:
        """The program of this step, and how many slots it computes: up to the last active one.

        Exactly so many, not in buckets of 1, 2, 4, 8: nothing is compiled or tuned for a shape
        here, so a slot more would only cost its computation.
        """
        self._active[:] = active
        return self._covering(active, self._mixed)

    def _covering(self, active: Bools, mixed: Bools) -> tuple[str, int]:
        kind = MIXED if (mixed & active).any() else PLAIN
        program = program_name(kind, self._nextn, self._most)
        return program, len(active) - int(active[::-1].argmax())


def _controls(manifest: Manifest) -> dict[str, NDArray[Any]]:
    """The mixed program's inputs that a request sets: everything but the state and `active`."""
    others = {s.name for s in manifest.state} | {"active"}
    inputs = manifest.programs[MIXED].inputs
    return _zeros([t for t in inputs if t.name not in others], manifest.build.max_batch)


def _outputs(manifest: Manifest, program: str) -> dict[str, NDArray[Any]]:
    """A program's outputs but the state."""
    outputs = manifest.programs[program].outputs
    own = [t for t in outputs if not t.name.endswith(".out")]
    return _zeros(own, manifest.build.max_batch)


def _zeros(tensors: Iterable[TensorSpec], slots: int) -> dict[str, NDArray[Any]]:
    """For all slots, whatever number of them a step takes."""
    return {t.name: np.zeros((slots, *t.shape[1:]), t.dtype) for t in tensors}  # type: ignore[arg-type]


def padded(value: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """A number as it is; a list with -1 behind it."""
    values = np.asarray(value)
    return np.pad(values, (0, shape[0] - len(values)), constant_values=-1) if shape else values


class Caches:
    """Latent caches [B, 1, S, C] laid out for the rows in use, so that a step reads only those.

    A graph takes contiguous tensors, so the first `rows` rows of every slot are kept adjacent in
    one allocation of B * S rows; slots move when `rows` changes (not if B = 1: it is a view).
    """

    device = "cpu"

    def __init__(self, specs: Sequence[StateSpec]) -> None:
        self._batch, _, self._capacity, _ = specs[0].shape
        self.rows = 0
        self._reserved = 0  # of an allocation's rows
        # Zeros: a masked row weighs next to nothing, but of an uninitialised NaN that is a NaN.
        self._flat = {
            s.name: np.zeros((self._batch * self._capacity, s.shape[3]), host_type(s.dtype))
            for s in specs
        }

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Each cache [B, 1, rows, C] on the host; sharing memory if it is there."""
        return self.views()

    def views(self, first: int = 0, count: int | None = None) -> dict[str, NDArray[Any]]:
        """Each cache [B, 1, rows, C], or `count` slots of it from `first` on, sharing memory."""
        R, count = self.rows, self._batch if count is None else count
        return {
            name: flat[first * R : (first + count) * R].reshape(count, 1, R, flat.shape[1])
            for name, flat in self._flat.items()
        }

    def pointers(self) -> dict[str, int]:
        """Where each cache begins in the memory of `device`."""
        return {name: flat.ctypes.data for name, flat in self._flat.items()}

    def copy(self, source: int, target: int, rows: int) -> None:
        """The first rows of slot `source` to slot `target`."""
        for cache in self.views().values():
            cache[target, :, :rows] = cache[source, :, :rows]

    def fit(self, rows: int) -> bool:
        """Make room for `rows` rows per slot; True if the layout, and so every view, changed."""
        if rows > self._capacity:
            raise EngineError(f"internal: {rows} cache rows asked for, {self._capacity} allocated")
        wanted = min(-(-rows // ROW_STEP) * ROW_STEP, self._capacity)
        if self._batch > 1:  # moving slots costs: grow by doubling, shrink late
            if wanted > self.rows:
                wanted = min(max(wanted, 2 * self.rows), self._capacity)
            elif wanted * 4 > self.rows:
                wanted = self.rows
        if wanted == self.rows:
            return False
        self._reserve(self._batch * wanted)
        if self._batch > 1 and self.rows:
            self._lay_out(wanted)
        self.rows = wanted
        return True

    def _reserve(self, rows: int) -> None:
        """Write to memory that no step has reached, a block at a time.

        Else the system would find a page for each cache whenever a step first writes to one, all
        threads waiting: up to 1 ms, every 13 tokens of deepseek-tiny.
        """
        if rows > self._reserved:
            for flat in self._flat.values():
                flat[self._reserved : rows] = 0
            self._reserved = rows

    def _lay_out(self, rows: int) -> None:
        """Move the slots from `self.rows` rows each to `rows` rows each."""
        keep = min(self.rows, rows)
        slots = range(self._batch)
        for b in slots if rows < self.rows else reversed(slots):
            for flat in self._flat.values():
                flat[b * rows : b * rows + keep] = flat[b * self.rows : b * self.rows + keep]


MakeCaches: TypeAlias = Callable[[Sequence[StateSpec]], Caches]
