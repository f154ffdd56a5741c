"""AOTInductor programs of one of several ranks, on a CPU or a GPU, with attention-DP or not."""

import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import PREFILL, Bools, Ints, StepOutput, host_type
from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.gpu.torch_cuda import Gpu, Wait, Work
from mtpbuild.runtime.group.channel import Channel, silence
from mtpbuild.runtime.group.nccl import Peers, connect, watch
from mtpbuild.runtime.group.one_shot import share_memory
from mtpbuild.runtime.group.start import count_ranks_on_machine
from mtpbuild.runtime.programs.aot_package import Opener
from mtpbuild.runtime.programs.attention_dp import AttentionDP
from mtpbuild.runtime.programs.host_slots import round_up_rows
from mtpbuild.runtime.programs.inductor_cpu import InductorPrograms, view_as_tensor
from mtpbuild.runtime.programs.inductor_cuda import CudaPrograms
from mtpbuild.runtime.threads import choose_default_threads

T = TypeVar("T")
AHEAD = 2  # calls that may be queued on a GPU before the host waits for the oldest


class CpuRankPrograms(InductorPrograms):
    """The programs of one rank on a CPU."""

    def __init__(
        self, channel: Channel, manifest: Manifest, threads: int | None, opener: Opener
    ) -> None:
        here = count_ranks_on_machine(manifest.build.tp)
        super().__init__(manifest, threads or max(1, choose_default_threads() // here), opener)
        self._channel = channel

    def _run(self, program: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with self._channel.unbroken(), silence:
            return super()._run(program, inputs)


class CudaRankPrograms(CudaPrograms):
    """The programs of one rank on a GPU.

    NCCL's collectives are captured with the steps. NCCL requires that all ranks capture and launch
    the same collectives in the same order on a communicator. This holds because ranks make the same
    calls, on one stream each. Rank 0 decides whether steps are captured at all.
    """

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
        self._channel, self._peers = channel, connect(gpu, channel, peers)
        self._queued = deque[Wait]()
        if manifest.target.allreduce_strategy is not None:
            opener = partial(opener, peers=share_memory(gpu, channel, self._peers))
        channel.leaving.append(partial(_finish_queued_work, gpu, channel, self._peers))
        super().__init__(manifest, gpu, opener, graphs=graphs)

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        self._queue_bounded(partial(super().prefill, slot, start, tokens))

    def launch(self, active: Bools, rows: int) -> Callable[[], StepOutput]:
        return self._queue_bounded(partial(super().launch, active, rows))

    def _queue_bounded(self, work: Callable[[], T]) -> T:
        """Queue a call's work; if more than AHEAD are queued, wait for the oldest."""
        with self._channel.unbroken(), silence:
            queued = work()
            self._queued.append(self._gpu.mark())
            while len(self._queued) > AHEAD:
                self._wait(self._queued.popleft())
            return queued

    def _wait(self, mark: Wait) -> None:
        with self._channel.unbroken():
            mark(watch(self._channel, self._peers))

    def _prepare_all(self, graphs: bool) -> dict[tuple[str, int], Work]:
        with self._channel.unbroken(), silence:
            dist.barrier()  # the first run needs all ranks, and some may still read their weights
            return super()._prepare_all(self._channel.share(graphs))


class CpuAttentionDPPrograms(AttentionDP, CpuRankPrograms):
    """The programs of one attention-DP rank on a CPU."""

    def __init__(
        self, channel: Channel, manifest: Manifest, threads: int | None, opener: Opener
    ) -> None:
        super().__init__(channel, manifest, threads, opener)
        self._join(channel, manifest)

    def step(self, active: Bools, rows: int) -> StepOutput:
        return self._gather(super().step(self._find_own_active(active), rows))

    def _prefill_padding(self, chunk: int) -> None:
        sizes = {"chunk": chunk, "rows": round_up_rows(chunk, self._capacity)}
        inputs = list[torch.Tensor]()
        for spec in self._programs[PREFILL].inputs:
            shape = [size if isinstance(size, int) else sizes[size] for size in spec.shape]
            inputs.append(view_as_tensor(np.zeros(shape, host_type(spec.dtype)), spec))
        self._run(PREFILL, inputs)


class CudaAttentionDPPrograms(AttentionDP, CudaRankPrograms):
    """The programs of one attention-DP rank on a GPU; results are gathered when they are read."""

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
        rows = round_up_rows(most, manifest.build.capacity)
        self._padding_caches = {  # the caches of a padding prefill, which belongs to no request
            s.name: gpu.zeros((1, 1, rows, s.sizes["width"]), s.dtype)
            for s in manifest.state
            if s.role == "rows"
        }
        super().__init__(channel, peers, manifest, gpu, opener, graphs=graphs)

    def launch(self, active: Bools, rows: int) -> Callable[[], StepOutput]:
        read_output = super().launch(self._find_own_active(active), rows)
        return lambda: self._gather(read_output())

    def _prefill_padding(self, chunk: int) -> None:
        self._gpu.copy(np.zeros(1, np.int64), self._prompt["start"])
        rows = round_up_rows(chunk, self._capacity)
        caches = {name: cache[:, :, :rows] for name, cache in self._padding_caches.items()}
        self._queue_bounded(lambda: self._fill_rows(caches, chunk))


def _finish_queued_work(gpu: Gpu, channel: Channel, peers: Peers) -> None:
    """Wait for a step that all ranks have launched and not read."""
    with contextlib.suppress(EngineError, RuntimeError):  # a lost rank: nobody reads the step
        gpu.settle(watch(channel, peers))
