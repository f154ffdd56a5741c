"""Slots in the host's memory, whose caches have only the rows in use."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtpbuild.runtime.manifest import Manifest, StateSpec
from mtpbuild.runtime.programs.base import PREFILL, TRUNK, Bools, host_type
from mtpbuild.runtime.programs.slots import Caches, Slots, own_outputs

ROW_STEP = 128  # a program's caches are given in multiples of this many rows


class HostMemory:
    """NumPy arrays; bfloat16 is held as bits."""

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
            name: self._zeros(own_outputs(program))
            for name, program in manifest.programs.items()
            if name not in (PREFILL, TRUNK)
        }

    def _fit_prompt(self, end: int) -> None:
        """Bind rows for a chunk up to position `end`; other slots may hold more."""
        self._fit(max(end, self._caches.rows if self._batch > 1 else 0))

    def _activate(self, active: Bools) -> tuple[str, int]:
        """The program of this step, and how many slots it computes."""
        self._active[:] = active
        return self._choose(active, self._mixed)


def rounded(rows: int, capacity: int) -> int:
    """The rows that a program is given which wants `rows` of them."""
    return min(-(-rows // ROW_STEP) * ROW_STEP, capacity)


class PackedCaches(Caches):
    """Latent caches [B, 1, S, C] laid out for the rows in use, so that a step reads only those.

    A graph takes contiguous tensors, so the first `rows` rows of every slot are kept adjacent in
    one allocation of B * S rows; slots move when `rows` changes (not if B = 1: it is a view).
    """

    device = "cpu"

    def __init__(self, state: Sequence[StateSpec]) -> None:
        specs = [s for s in state if s.kind == "cache"]
        self._batch, _, self._capacity, _ = specs[0].shape
        self.rows = 0
        self._reserved = 0  # rows of an allocation that were written to
        # Zeros: a masked row weighs next to nothing, but of an uninitialised NaN that is a NaN.
        self._flat = {
            s.name: np.zeros((self._batch * self._capacity, s.shape[3]), host_type(s.dtype))
            for s in specs
        }

    def arrays(self) -> dict[str, NDArray[Any]]:
        return self.views()

    def views(self, first: int = 0, count: int | None = None) -> dict[str, NDArray[Any]]:
        """Each cache [B, 1, rows, C], or `count` slots of it from `first` on, sharing memory."""
        R, count = self.rows, self._batch if count is None else count
        return {
            name: flat[first * R : (first + count) * R].reshape(count, 1, R, flat.shape[1])
            for name, flat in self._flat.items()
        }

    def pointers(self) -> dict[str, int]:
        """The address of each cache in the memory of `device`."""
        return {name: flat.ctypes.data for name, flat in self._flat.items()}

    def move(self, source: int, target: int, lengths: NDArray[Any]) -> None:
        rows = int(lengths[source])
        for cache in self.views().values():
            cache[target, :, :rows] = cache[source, :, :rows]

    def fit(self, rows: int) -> bool:
        wanted = rounded(rows, self._capacity)
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
