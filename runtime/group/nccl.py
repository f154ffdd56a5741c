"""Runs an engine whose model is shared by GPUs: each rank takes one, NCCL sums between them.

What rank 0 tells the others goes over gloo, as on CPUs (`inductor_ranks.py`). NCCL waits on the
GPU, for ever if another rank is gone; so the host asks while it waits, and aborts.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed.distributed_c10d import _abort_process_group

from mtpbuild.runtime.errors import RankError
from mtpbuild.runtime.group.lead import Channel, silent, use_in_programs
from mtpbuild.runtime.group.start import environment, own_gpu
from mtpbuild.runtime.manifest import Manifest
from mtpbuild.runtime.programs import inductor_cuda
from mtpbuild.runtime.programs.base import Bools, Ints, StepOutput
from mtpbuild.runtime.programs.inductor_cuda import CudaPrograms
from mtpbuild.runtime.programs.torch_cuda import Gpu

# NCCL's watchdog ends a collective that hangs, not the process (torchrun would have it so): it also
# frees a host that is stuck in a full queue of launches. Nothing is dumped.
WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
ABORTING = 10.0  # seconds, at most
T = TypeVar("T")


class Peers:
    """The group of all ranks' GPUs. All ranks make it, at the same time."""

    backend = "nccl"

    def __init__(self, device: torch.device, limit: float) -> None:
        self._device = device
        with environment(WATCHDOG):
            group = dist.new_group(backend=self.backend, timeout=timedelta(seconds=limit))
        assert isinstance(group, dist.ProcessGroup)
        self.group = group

    def failed(self) -> bool:
        """Whether NCCL has found a rank gone: then sums end early, and hold anything."""
        return self.group._get_backend(self._device).get_error() != ErrorType.SUCCESS

    def abort(self) -> None:
        """Waits for no rank; whatever a GPU still waits for ends."""
        with contextlib.suppress(RuntimeError, ValueError):  # ValueError: it is gone already
            within(ABORTING, partial(_abort_process_group, self.group))


class CudaRankPrograms(CudaPrograms):
    """The programs of one rank. No CUDA graphs: collectives in them have not been tried."""

    def __init__(self, folder: Path, manifest: Manifest, gpu: Gpu, channel: Channel) -> None:
        self._channel, self._peers = channel, connect(gpu, channel)
        super().__init__(folder, manifest, gpu, graphs=False)

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


def connect(gpu: Gpu, channel: Channel) -> Peers:
    """NCCL between all ranks' GPUs, for the programs; its communicator is made by a first sum."""
    with channel.unbroken():
        dist.barrier()  # a rank without a GPU has left: NCCL would wait for it
        peers = Peers(gpu.device, channel.limit)
        channel.leaving.append(peers.abort)
        use_in_programs(peers.group)
        one, alive = gpu.zeros((1,), torch.float32), watch(channel, peers)

        def meet() -> None:
            gpu.run(lambda: dist.all_reduce(one, group=peers.group))
            gpu.settle(alive)

        with silent():
            within(channel.patience, meet)
    return peers


def watch(channel: Channel, peers: Peers) -> Callable[[], None]:
    """What is asked while a GPU computes; raises when another rank is gone, or the time is over."""
    end = time.monotonic() + channel.patience

    def alive() -> None:
        if channel.failure:  # rank 0's other thread has noticed
            raise RankError(channel.failure)
        if time.monotonic() > end:
            raise RuntimeError("timed out")
        if peers.failed():
            raise RuntimeError("NCCL has lost another rank")

    return alive


def within(seconds: float, work: Callable[[], object]) -> None:
    """Or raise RuntimeError: where NCCL has no time limit. The thread is left to it."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise RuntimeError("timed out")
    if failures:
        raise failures[0]


def load(folder: Path, manifest: Manifest, channel: Channel) -> CudaPrograms:
    """A rank's programs, once all are in the group: who fails here is noticed."""
    make = partial(CudaRankPrograms, channel=channel)
    return inductor_cuda.load(folder, manifest, Gpu(own_gpu()), make)
