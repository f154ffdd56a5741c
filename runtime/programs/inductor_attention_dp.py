"""Attention-DP: each rank has requests and caches of its own, and all share the routed experts.

Experts see the tokens of all ranks at once, equally many of each. So all ranks make the same calls,
for the slots of all, which are numbered rank by rank; what is another's is padding here.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mtpbuild.runtime.controls import GREEDY, Controls
from mtpbuild.runtime.group.lead import Channel, RankPrograms
from mtpbuild.runtime.manifest import Manifest
from mtpbuild.runtime.programs.base import Bools, Ints, StepOutput, host_type
from mtpbuild.runtime.programs.inductor import shared
from mtpbuild.runtime.programs.slots import ROW_STEP


class AttentionDPPrograms(RankPrograms):
    """A rank's programs, which are called as if they were those of all ranks."""

    def __init__(
        self, folder: Path, manifest: Manifest, threads: int | None, channel: Channel
    ) -> None:
        super().__init__(folder, manifest, threads, channel)
        self._slots = manifest.build.max_batch
        self._every_mixed = np.zeros((manifest.build.tp, self._slots), np.bool_)
        self._chunks = [deque[tuple[int, int, Ints]]() for _ in range(manifest.build.tp)]
        self._capacity = manifest.state[0].shape[2]

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        """Before the next step or move, so that ranks fill in their prompts together."""
        rank, own = divmod(slot, self._slots)
        self._chunks[rank].append((own, start, tokens))

    def begin(self, slot: int, length: int, newest: int, controls: Controls = GREEDY) -> None:
        rank, own = divmod(slot, self._slots)
        self._every_mixed[rank, own] = not controls.plain
        if rank == self._rank:
            super().begin(own, length, newest, controls)

    def move(self, source: int, target: int) -> None:
        self._fill()
        rank, to = divmod(target, self._slots)
        assert source // self._slots == rank, "a request stays on its rank"
        self._every_mixed[rank, to] = self._every_mixed[rank, source % self._slots]
        if rank == self._rank:
            super().move(source % self._slots, to)

    def step(self, active: Bools, rows: int) -> StepOutput:
        """Of all ranks' slots."""
        self._fill()
        own = super().step(active, rows)
        given = {f.name: getattr(own, f.name) for f in fields(own)}
        arrays = {name: array for name, array in given.items() if array is not None}
        every = _unpacked(self._channel.gather(_packed(arrays.values())), arrays)
        return StepOutput(**every)

    def _fill(self) -> None:
        """Run the chunks that wait: at once those of one length, of each rank its next."""
        while any(self._chunks):
            size = max(len(chunks[0][2]) for chunks in self._chunks if chunks)
            for rank, chunks in enumerate(self._chunks):
                chunk = chunks.popleft() if chunks and len(chunks[0][2]) == size else None
                if rank != self._rank:
                    continue
                if chunk is None:
                    self._run("prefill", self._padding(size - self.lookahead))
                else:
                    super().prefill(*chunk)

    def _activate(self, active: Bools) -> tuple[str, int]:
        """Of a step in which some rank's slots are active: the same on all ranks."""
        every = active.reshape(self._every_mixed.shape)
        self._active[:] = every[self._rank]
        some = np.logical_or.reduce  # of the ranks' slots with the same number
        return self._covering(some(every), some(every & self._every_mixed))

    def _padding(self, chunk: int) -> list[torch.Tensor]:
        """Inputs of a prefill whose results nobody reads."""
        rows = min(-(-chunk // ROW_STEP) * ROW_STEP, self._capacity)
        sizes = {"chunk": chunk, "rows": rows}
        inputs = []
        for spec in self._programs["prefill"].inputs:
            shape = [size if isinstance(size, int) else sizes[size] for size in spec.shape]
            inputs.append(shared(np.zeros(shape, host_type(spec.dtype)), spec))
        return inputs


def _packed(arrays: Iterable[NDArray[Any]]) -> NDArray[np.uint8]:
    """[B, ..] each -> [B, N]: the bytes of each slot."""
    return np.concatenate([a.reshape(len(a), -1).view(np.uint8) for a in arrays], axis=1)


def _unpacked(
    slots: NDArray[np.uint8], like: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """As they were packed, for more slots."""
    ends = np.cumsum([array.nbytes // len(array) for array in like.values()])
    parts = map(np.ascontiguousarray, np.split(slots, ends[:-1], axis=1))
    return {
        name: part.view(array.dtype).reshape(-1, *array.shape[1:])
        for (name, array), part in zip(like.items(), parts, strict=True)
    }
