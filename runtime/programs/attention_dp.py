"""Attention-DP: a rank has requests and caches of its own, and all share the routed experts.

Experts see the tokens of all ranks at once, equally many of each. So all ranks make the same calls,
for the slots of all, which are numbered rank by rank; what is another's is padding here.
"""

from collections import deque
from dataclasses import fields

import numpy as np

from mtpbuild.runtime.controls import GREEDY, Controls
from mtpbuild.runtime.group.channel import Channel
from mtpbuild.runtime.manifest import Manifest
from mtpbuild.runtime.programs.base import Bools, Ints, StepOutput
from mtpbuild.runtime.programs.slots import Slots


class AttentionDP(Slots):
    """Stands before a rank's own programs among the bases of a class, and gives them their part."""

    _channel: Channel

    def share_out(self, channel: Channel, manifest: Manifest) -> None:
        """Count the ranks; to be called before the first request."""
        self._rank, ranks = channel.rank, manifest.build.tp
        self._every_mixed = np.zeros((ranks, self._batch), np.bool_)
        self._chunks = [deque[tuple[int, int, Ints]]() for _ in range(ranks)]

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        """Before the next step or move, so that ranks fill in their prompts together."""
        rank, own = divmod(slot, self._batch)
        self._chunks[rank].append((own, start, tokens))

    def begin(self, slot: int, length: int, newest: int, controls: Controls = GREEDY) -> None:
        rank, own = divmod(slot, self._batch)
        self._every_mixed[rank, own] = not controls.plain
        if rank == self._rank:
            super().begin(own, length, newest, controls)

    def move(self, source: int, target: int) -> None:
        self._fill()
        rank, to = divmod(target, self._batch)
        assert source // self._batch == rank, "a request stays on its rank"
        self._every_mixed[rank, to] = self._every_mixed[rank, source % self._batch]
        if rank == self._rank:
            super().move(source % self._batch, to)

    def step(self, active: Bools, rows: int) -> StepOutput:
        """A step of all ranks' slots: this rank computes its own, and is told of the others'."""
        self._fill()
        own = self.own_step(active, rows)
        given = {f.name: getattr(own, f.name) for f in fields(own)}
        arrays = {name: array for name, array in given.items() if array is not None}
        packed = np.concatenate([array.ravel().view(np.uint8) for array in arrays.values()])
        ends = np.cumsum([array.nbytes for array in arrays.values()])
        pieces = np.split(self._channel.gather(packed), ends[:-1], axis=1)  # [ranks, bytes] each
        every = {
            name: np.ascontiguousarray(piece).view(array.dtype).reshape(-1, *array.shape[1:])
            for (name, array), piece in zip(arrays.items(), pieces, strict=True)
        }
        return StepOutput(**every)

    def chosen(self, active: Bools) -> tuple[Bools, str, int]:
        """Of all slots that are active: this rank's, and the program and slots of all ranks."""
        every = active.reshape(self._every_mixed.shape)
        some = np.logical_or.reduce  # over the ranks' slots with the same number
        return every[self._rank], *self._choose(some(every), some(every & self._every_mixed))

    def _fill(self) -> None:
        """Run the chunks that wait, at once those that are next on their rank and of one length."""
        while any(self._chunks):
            size = max(len(chunks[0][2]) for chunks in self._chunks if chunks)
            for rank, chunks in enumerate(self._chunks):
                chunk = chunks.popleft() if chunks and len(chunks[0][2]) == size else None
                if rank != self._rank:
                    continue
                if chunk is None:
                    self.pad(size - self.lookahead)
                else:
                    self.own_prefill(*chunk)

    def own_prefill(self, slot: int, start: int, tokens: Ints) -> None:
        """Fill a slot of this rank."""
        raise NotImplementedError

    def own_step(self, active: Bools, rows: int) -> StepOutput:
        """A step of this rank's slots; `active` is of all, as `chosen` takes it."""
        raise NotImplementedError

    def pad(self, chunk: int) -> None:
        """Run a prefill of so many tokens whose results nobody reads."""
        raise NotImplementedError
