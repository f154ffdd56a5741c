"""Attention-DP: each rank has its own requests and caches, and all ranks share the routed experts.

The experts take the tokens of all ranks at once, the same number from each. So all ranks make the
same calls, for all ranks' slots, numbered rank by rank; each computes its own slots or padding.
"""

from collections import deque
from dataclasses import fields
from typing import Any

import numpy as np

from mtpbuild.runtime.contract.controls import GREEDY, StepControls
from mtpbuild.runtime.contract.programs import Bools, Ints, StepOutput
from mtpbuild.runtime.errors import running_program
from mtpbuild.runtime.group.channel import Channel
from mtpbuild.runtime.programs.slots import Slots


class AttentionDP(Slots):
    """A mixin for any target that maps slots to ranks and chooses one program for all ranks.

    It must come before the class of a rank's programs in the list of bases.
    """

    _channel: Channel

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Load this rank's programs, and set up the slots of all ranks."""
        super().__init__(*arguments, **options)
        self._rank, ranks = self._channel.rank, self._channel.ranks
        self._every_active = np.zeros((ranks, self._batch), np.bool_)
        self._every_mixed = np.zeros((ranks, self._batch), np.bool_)
        self._chunks = [deque[tuple[int, int, Ints]]() for _ in range(ranks)]
        self._allocate_padding()

    def _allocate_padding(self) -> None:
        """Allocate what a padding prefill writes to, as all slots may be in use."""

    def _prefill_padding(self, chunk: int) -> None:
        """Run a padding prefill of `chunk` tokens, whose results are not used."""
        raise NotImplementedError

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        """Queue a chunk until the next step or move, so that ranks run their prefills together."""
        rank, local = divmod(slot, self._batch)
        self._chunks[rank].append((local, start, tokens))

    def begin(self, slot: int, length: int, newest: int, controls: StepControls = GREEDY) -> None:
        rank, local = divmod(slot, self._batch)
        self._every_mixed[rank, local] = not controls.plain
        if rank == self._rank:
            super().begin(local, length, newest, controls)

    def move(self, source: int, target: int) -> None:
        self._run_queued_chunks()
        (rank, old), (new_rank, new) = divmod(source, self._batch), divmod(target, self._batch)
        assert rank == new_rank, "a request stays on its rank"
        self._every_mixed[rank, new] = self._every_mixed[rank, old]
        if rank == self._rank:
            super().move(old, new)

    def finite(self, slot: int, rows: int) -> bool:
        self._run_queued_chunks()
        rank, local = divmod(slot, self._batch)
        return rank != self._rank or super().finite(local, rows)

    def clear(self, slot: int) -> None:
        rank, local = divmod(slot, self._batch)
        if rank == self._rank:
            super().clear(local)

    def _run_queued_chunks(self) -> None:
        """Run the queued chunks; the next chunks of several ranks run together if equally long."""
        while any(self._chunks):
            size = max(len(chunks[0][2]) for chunks in self._chunks if chunks)
            for rank, chunks in enumerate(self._chunks):
                chunk = chunks.popleft() if chunks and len(chunks[0][2]) == size else None
                if rank != self._rank:
                    continue
                with running_program():  # also in `move` and `finite`
                    if chunk is None:
                        self._prefill_padding(size - self.lookahead)
                    else:
                        super().prefill(*chunk)

    def _find_own_active(self, active: Bools) -> Bools:
        """Run the queued chunks; return which of this rank's slots are active in a step."""
        self._run_queued_chunks()
        self._every_active[:] = active.reshape(self._every_active.shape)
        return self._every_active[self._rank]

    def _choose(self, active: Bools, mixed: Bools) -> tuple[str, int]:
        """Choose the program and the number of slots that suffice for every rank."""
        on_any_rank = np.logical_or.reduce  # [ranks, slots] -> [slots]
        mixed_slots = self._every_active & self._every_mixed
        return super()._choose(on_any_rank(self._every_active), on_any_rank(mixed_slots))

    def _gather(self, output: StepOutput) -> StepOutput:
        """Gather the step output of all ranks' slots from those of this rank's slots."""
        values = ((field.name, getattr(output, field.name)) for field in fields(output))
        arrays = {name: array for name, array in values if array is not None}
        packed = np.concatenate([array.ravel().view(np.uint8) for array in arrays.values()])
        ends = np.cumsum([array.nbytes for array in arrays.values()])
        pieces = np.split(self._channel.gather(packed), ends[:-1], axis=1)  # [ranks, bytes] each
        gathered = {
            name: np.ascontiguousarray(piece).view(array.dtype).reshape(-1, *array.shape[1:])
            for (name, array), piece in zip(arrays.items(), pieces, strict=True)
        }
        return StepOutput(**gathered)
