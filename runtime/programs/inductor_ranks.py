"""Runs a rank's AOTInductor programs, on a CPU or a GPU, beside those of the other ranks."""

import os
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from mtpbuild.runtime.controls import GREEDY, Controls
from mtpbuild.runtime.group.channel import Channel, silent
from mtpbuild.runtime.group.nccl import Peers, connect, watch
from mtpbuild.runtime.manifest import Manifest
from mtpbuild.runtime.programs.aot_package import Opener
from mtpbuild.runtime.programs.base import PREFILL, Bools, Ints, StepOutput, host_type
from mtpbuild.runtime.programs.host_slots import rounded
from mtpbuild.runtime.programs.inductor_cpu import InductorPrograms, shared
from mtpbuild.runtime.programs.inductor_cuda import CudaPrograms
from mtpbuild.runtime.programs.torch_cuda import Gpu

T = TypeVar("T")


class RankPrograms(InductorPrograms):
    """The programs of one rank on a CPU."""

    def __init__(
        self, channel: Channel, manifest: Manifest, threads: int | None, opener: Opener
    ) -> None:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        super().__init__(manifest, threads or max(1, torch.get_num_threads() // here), opener)
        self._channel = channel

    def _run(self, program: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with self._channel.unbroken(), silent():
            return super()._run(program, inputs)


class CudaRankPrograms(CudaPrograms):
    """The programs of one rank on a GPU. No CUDA graphs: collectives in them were not tried."""

    def __init__(
        self, channel: Channel, peers: type[Peers], manifest: Manifest, gpu: Gpu, opener: Opener
    ) -> None:
        self._channel, self._peers = channel, connect(gpu, channel, peers)
        super().__init__(manifest, gpu, opener, graphs=False)

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        self._through(partial(super().prefill, slot, start, tokens))

    def step(self, active: Bools, rows: int) -> StepOutput:
        return self._through(partial(self.launch, active, rows))()

    def _through(self, work: Callable[[], T]) -> T:
        """Queue it and wait for the GPU, as long as the others are there."""
        with self._channel.unbroken(), silent():
            alive = watch(self._channel, self._peers)
            queued = work()
            self._gpu.settle(alive)
            return queued


class AttentionDPPrograms(RankPrograms):
    """Attention-DP: a rank has requests and caches of its own, and all share the routed experts.

    Experts see the tokens of all ranks at once, equally many of each. So all ranks make the same
    calls, for the slots of all, which are numbered rank by rank; what is another's is padding here.
    """

    def __init__(
        self, channel: Channel, manifest: Manifest, threads: int | None, opener: Opener
    ) -> None:
        super().__init__(channel, manifest, threads, opener)
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
        own = super().step(active, rows)
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

    def _fill(self) -> None:
        """Run the chunks that wait, at once those that are next on their rank and of one length."""
        while any(self._chunks):
            size = max(len(chunks[0][2]) for chunks in self._chunks if chunks)
            for rank, chunks in enumerate(self._chunks):
                chunk = chunks.popleft() if chunks and len(chunks[0][2]) == size else None
                if rank != self._rank:
                    continue
                if chunk is None:
                    self._run(PREFILL, self._padding(size - self.lookahead))
                else:
                    super().prefill(*chunk)

    def _activate(self, active: Bools) -> tuple[str, int]:
        """The program of a step in which some rank's slots are active: the same on all ranks."""
        every = active.reshape(self._every_mixed.shape)
        self._active[:] = every[self._rank]
        some = np.logical_or.reduce  # over the ranks' slots with the same number
        return self._choose(some(every), some(every & self._every_mixed))

    def _padding(self, chunk: int) -> list[torch.Tensor]:
        """Make the inputs of a prefill whose results nobody reads."""
        sizes = {"chunk": chunk, "rows": rounded(chunk, self._capacity)}
        inputs = []
        for spec in self._programs[PREFILL].inputs:
            shape = [size if isinstance(size, int) else sizes[size] for size in spec.shape]
            inputs.append(shared(np.zeros(shape, host_type(spec.dtype)), spec))
        return inputs
