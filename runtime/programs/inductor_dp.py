"""Attention-DP: a rank has requests and caches of its own, and all share the routed experts.

Experts see the tokens of all ranks at once, equally many of each. So all ranks make the same
calls, for the slots of all, which are numbered rank by rank; what is another's is padding here.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import fields

import numpy as np
import torch

from mtpbuild.runtime.controls import GREEDY, Controls
from mtpbuild.runtime.group.channel import Channel
from mtpbuild.runtime.group.nccl import Peers
from mtpbuild.runtime.manifest import Manifest
from mtpbuild.runtime.programs.aot_package import Opener
from mtpbuild.runtime.programs.base import PREFILL, Bools, Ints, StepOutput, host_type
from mtpbuild.runtime.programs.host_slots import rounded
from mtpbuild.runtime.programs.inductor_cpu import shared
from mtpbuild.runtime.programs.inductor_ranks import CudaRankPrograms, RankPrograms
from mtpbuild.runtime.programs.slots import Slots
from mtpbuild.runtime.programs.torch_cuda import Gpu


class AttentionDP(Slots):
    """What is the same on CPUs and GPUs: whose slots are meant, and which program all ranks run."""

    _channel: Channel

    def _join(self, channel: Channel, manifest: Manifest) -> None:
        self._rank, ranks, slots = channel.rank, manifest.build.tp, manifest.build.max_batch
        self._every_active = np.zeros((ranks, slots), np.bool_)
        self._every_mixed = np.zeros((ranks, slots), np.bool_)
        self._chunks = [deque[tuple[int, int, Ints]]() for _ in range(ranks)]

    def _fill_own(self, slot: int, start: int, tokens: Ints) -> None:
        """Fill in a chunk of a prompt of this rank's."""
        raise NotImplementedError

    def _fill_nothing(self, chunk: int) -> None:
        """Run a prefill of so many tokens whose results nobody reads."""
        raise NotImplementedError

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

    def _fill(self) -> None:
        """Run the chunks that wait, at once those that are next on their rank and of one length."""
        while any(self._chunks):
            size = max(len(chunks[0][2]) for chunks in self._chunks if chunks)
            for rank, chunks in enumerate(self._chunks):
                chunk = chunks.popleft() if chunks and len(chunks[0][2]) == size else None
                if rank != self._rank:
                    continue
                if chunk is None:
                    self._fill_nothing(size - self.lookahead)
                else:
                    self._fill_own(*chunk)

    def _own(self, active: Bools) -> Bools:
        """This rank's slots of those that a step is for, once their prompts are filled in."""
        self._fill()
        self._every_active[:] = active.reshape(self._every_active.shape)
        return self._every_active[self._rank]

    def _choose(self, active: Bools, mixed: Bools) -> tuple[str, int]:
        """The program of a step in which some rank's slots are active: the same on all ranks."""
        some = np.logical_or.reduce  # over the ranks' slots with the same number
        every = self._every_active
        return super()._choose(some(every), some(every & self._every_mixed))

    def _gathered(self, own: StepOutput) -> StepOutput:
        """A step of all ranks' slots: this rank has computed its own, and is told the others'."""
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


class AttentionDPPrograms(AttentionDP, RankPrograms):
    """The programs of one rank on a CPU."""

    def __init__(
        self, channel: Channel, manifest: Manifest, threads: int | None, opener: Opener
    ) -> None:
        super().__init__(channel, manifest, threads, opener)
        self._join(channel, manifest)

    def step(self, active: Bools, rows: int) -> StepOutput:
        return self._gathered(super().step(self._own(active), rows))

    def _fill_own(self, slot: int, start: int, tokens: Ints) -> None:
        RankPrograms.prefill(self, slot, start, tokens)

    def _fill_nothing(self, chunk: int) -> None:
        sizes = {"chunk": chunk, "rows": rounded(chunk, self._capacity)}
        inputs = list[torch.Tensor]()
        for spec in self._programs[PREFILL].inputs:
            shape = [size if isinstance(size, int) else sizes[size] for size in spec.shape]
            inputs.append(shared(np.zeros(shape, host_type(spec.dtype)), spec))
        self._run(PREFILL, inputs)


class CudaAttentionDPPrograms(AttentionDP, CudaRankPrograms):
    """The programs of one rank on a GPU. What a step gave is gathered when the host reads it."""

    def __init__(
        self,
        channel: Channel,
        peers: type[Peers],
        manifest: Manifest,
        gpu: Gpu,
        opener: Opener,
        *,
        graphs: bool = True,
    ) -> None:
        self._join(channel, manifest)
        most = manifest.build.prefill_chunk
        self._nowhere = {  # rows that a prompt fills in which is nobody's
            s.name: gpu.zeros((1, 1, rounded(most, s.shape[2]), s.shape[3]), s.dtype)
            for s in manifest.state
            if s.kind == "cache"
        }
        super().__init__(channel, peers, manifest, gpu, opener, graphs=graphs)

    def launch(self, active: Bools, rows: int) -> Callable[[], StepOutput]:
        land = super().launch(self._own(active), rows)
        return lambda: self._gathered(land())

    def _fill_own(self, slot: int, start: int, tokens: Ints) -> None:
        CudaRankPrograms.prefill(self, slot, start, tokens)

    def _fill_nothing(self, chunk: int) -> None:
        self._gpu.copy(np.zeros(1, np.int64), self._prompt["start"])
        rows = rounded(chunk, self._capacity)
        caches = {name: cache[:, :, :rows] for name, cache in self._nowhere.items()}
        self._in_turn(lambda: self._fill_rows(caches, chunk))
