"""AOTInductor programs of one of several ranks, on a CPU or a GPU."""

import contextlib
import os
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import Bools, Ints, StepOutput
from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.gpu.torch_cuda import Gpu, Wait, Work
from mtpbuild.runtime.group.channel import Channel, silent
from mtpbuild.runtime.group.nccl import Peers, connect, watch
from mtpbuild.runtime.group.one_shot import share
from mtpbuild.runtime.programs.aot_package import Opener
from mtpbuild.runtime.programs.inductor_cpu import InductorPrograms
from mtpbuild.runtime.programs.inductor_cuda import CudaPrograms
from mtpbuild.runtime.threads import default_threads

T = TypeVar("T")
AHEAD = 2  # pieces of work that may be queued on a GPU before the host waits for the oldest


class CpuRankPrograms(InductorPrograms):
    """The programs of one rank on a CPU."""

    def __init__(
        self, channel: Channel, manifest: Manifest, threads: int | None, opener: Opener
    ) -> None:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        super().__init__(manifest, threads or max(1, default_threads() // here), opener)
        self._channel = channel

    def _run(self, program: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with self._channel.unbroken(), silent():
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
            opener = partial(opener, peers=share(gpu, channel, self._peers))
        channel.leaving.append(partial(_come_to_rest, gpu, channel, self._peers))
        super().__init__(manifest, gpu, opener, graphs=graphs)

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        self._in_turn(partial(super().prefill, slot, start, tokens))

    def launch(self, active: Bools, rows: int) -> Callable[[], StepOutput]:
        return self._in_turn(partial(super().launch, active, rows))

    def _in_turn(self, work: Callable[[], T]) -> T:
        """Queue work; wait if more than AHEAD pieces are queued, each wait with the time limit."""
        with self._channel.unbroken(), silent():
            queued = work()
            self._queued.append(self._gpu.mark())
            while len(self._queued) > AHEAD:
                self._wait(self._queued.popleft())
            return queued

    def _wait(self, mark: Wait) -> None:
        with self._channel.unbroken():
            mark(watch(self._channel, self._peers))

    def _prepare_all(self, graphs: bool) -> dict[tuple[str, int], Work]:
        with self._channel.unbroken(), silent():
            dist.barrier()  # the first run needs all ranks, and some may still read their weights
            return super()._prepare_all(self._channel.share(graphs))


def _come_to_rest(gpu: Gpu, channel: Channel, peers: Peers) -> None:
    """Wait for a step that was launched on all ranks but not read."""
    with contextlib.suppress(EngineError, RuntimeError):
        gpu.settle(watch(channel, peers))
