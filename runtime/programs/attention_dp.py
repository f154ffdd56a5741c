"""Attention-DP: each rank has its own requests and caches, and all ranks share the routed experts.

The experts get the tokens of all ranks at once, equally many of each. So all ranks make the same
calls, for the slots of all ranks, which are numbered rank by rank. Other ranks' slots are padding.
"""

from collections import deque
from dataclasses import fields

import numpy as np

from mtpbuild.runtime.contract.controls import GREEDY, StepControls
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import Bools, Ints, StepOutput
from mtpbuild.runtime.group.channel import Channel
from mtpbuild.runtime.programs.slots import Slots


class AttentionDP(Slots):
    """A mixin for any target that maps slots to ranks and chooses one program for all ranks.

    It must come before the class of a rank's programs in the list of bases.
    """

    _channel: Channel

    def _join(self, channel: Channel, manifest: Manifest) -> None:
        """Set up the ranks' slots; must be called before the first request and before captures."""
        self._rank, ranks, slots = channel.rank, manifest.build.tp, manifest.build.max_batch
        self._every_active = np.zeros((ranks, slots), np.bool_)
        self._every_mixed = np.zeros((ranks, slots), np.bool_)
        self._chunks = [deque[tuple[int, int, Ints]]() for _ in range(ranks)]

    def _fill_nothing(self, chunk: int) -> None:
        """Run a padding prefill of `chunk` tokens, whose results are not used."""
        raise NotImplementedError

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        """Queue a chunk until the next step or move, so that ranks run their prefills together."""
        rank, own = divmod(slot, self._batch)
        self._chunks[rank].append((own, start, tokens))

    def begin(self, slot: int, length: int, newest: int, controls: StepControls = GREEDY) -> None:
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

    def finite(self, slot: int, rows: int) -> bool:
        self._fill()
        rank, own = divmod(slot, self._batch)
        return rank != self._rank or super().finite(own, rows)

    def clear(self, slot: int) -> None:
        rank, own = divmod(slot, self._batch)
        if rank == self._rank:
            super().clear(own)

    def _fill(self) -> None:
        """Run the queued chunks; the ranks' next chunks of the same length run together."""
        while any(self._chunks):
            size = max(len(chunks[0][2]) for chunks in self._chunks if chunks)
            for rank, chunks in enumerate(self._chunks):
                chunk = chunks.popleft() if chunks and len(chunks[0][2]) == size else None
                if rank != self._rank:
                    continue
                if chunk is None:
                    self._fill_nothing(size - self.lookahead)
                else:
                    super().prefill(*chunk)

    def _own(self, active: Bools) -> Bools:
        """Run the queued chunks, then return which of this rank's slots are active in a step."""
        self._fill()
        self._every_active[:] = active.reshape(self._every_active.shape)
        return self._every_active[self._rank]

    def _choose(self, active: Bools, mixed: Bools) -> tuple[str, int]:
        """Choose one program and number of slots for all ranks, as any of them needs it."""
        some = np.logical_or.reduce  # over the ranks' slots with the same number
        every = self._every_active
        return super()._choose(some(every), some(every & self._every_mixed))

    def _gathered(self, own: StepOutput) -> StepOutput:
        """Gather the step output of all ranks' slots; each rank has computed its own."""
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
