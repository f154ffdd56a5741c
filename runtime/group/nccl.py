"""Sums between the GPUs that share a model: each rank takes one, and NCCL connects them.

What rank 0 tells the others goes over gloo, as on CPUs (`channel.py`). NCCL waits on the GPU, for
ever if another rank is gone; so the host asks while it waits, and aborts.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType
from torch.distributed.distributed_c10d import _abort_process_group

from mtpbuild.runtime.errors import RankError
from mtpbuild.runtime.group.channel import Channel, silent, use_in_programs
from mtpbuild.runtime.group.start import environment
from mtpbuild.runtime.programs.torch_cuda import Gpu

SETTINGS = {
    # NCCL's watchdog ends a collective that hangs, not the process (torchrun would have it so): it
    # also frees a host that is stuck in a full queue of launches. Nothing is dumped.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Else the host waits for each collective by asking for its event, which can't be captured.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # A prompt's collectives are not captured and may be queued behind a captured step, on the same
    # communicator: NCCL's default lets them, a machine that is tuned for graphs alone may not.
    "NCCL_GRAPH_MIXING_SUPPORT": "1",
}
T = TypeVar("T")
ABORTING = 10.0  # seconds, at most


class Peers:
    """Is the group of all ranks' GPUs. All ranks make it at the same time."""

    backend = "nccl"

    def __init__(self, device: torch.device, limit: float) -> None:
        self._device = device
        group = dist.new_group(backend=self.backend, timeout=timedelta(seconds=limit))
        assert isinstance(group, dist.ProcessGroup)
        self.group = group
        self._kept: Any = None  # memory that ranks share lives as long

    def share(self, size: int) -> tuple[Tensor, list[int]]:
        """Makes bytes on this GPU that all see; says where this one sees each rank's."""
        from torch.distributed import _symmetric_memory as symmetric

        with torch.cuda.device(self._device):
            memory = symmetric.empty(size, dtype=torch.uint8, device=self._device)
            handle = symmetric.rendezvous(memory, self.group)
        self._kept = memory, handle
        inside = memory.data_ptr() - handle.buffer_ptrs[handle.rank]  # a piece of an allocation
        return memory, [address + inside for address in handle.buffer_ptrs]

    def failed(self) -> bool:
        """Tells whether NCCL has found a rank gone: then sums end early, and hold anything."""
        return self.group._get_backend(self._device).get_error() != ErrorType.SUCCESS

    def abort(self) -> None:
        """Wait for no rank; whatever a GPU still waits for ends."""
        with contextlib.suppress(RuntimeError, ValueError):  # ValueError: it is gone already
            within(ABORTING, partial(_abort_process_group, self.group))


def connect(gpu: Gpu, channel: Channel, make_peers: type[Peers] = Peers) -> Peers:
    """Let programs sum between all ranks' GPUs; NCCL's communicator is made by a first sum.

    It is the only one. torch and NCCL read the settings until it is there.
    """
    with channel.unbroken(), environment(SETTINGS):
        dist.barrier()  # a rank without a GPU has left: NCCL would wait for it
        peers = make_peers(gpu.device, channel.limit)
        channel.leaving.append(peers.abort)
        use_in_programs(peers.group)
        alive = watch(channel, peers)

        def meet() -> None:
            gpu.run(lambda: dist.all_reduce(torch.ones(1, device=gpu.device), group=peers.group))
            gpu.settle(alive)

        with silent():
            within(channel.patience, meet)
    return peers


class Connected(Protocol):
    """Declares what connects GPUs, as far as it is asked while they compute."""

    def failed(self) -> bool: ...


def watch(channel: Channel, peers: Connected) -> Callable[[], None]:
    """Returns what to call while a GPU computes: it raises if a rank is gone or time is over."""
    end = time.monotonic() + channel.patience

    def alive() -> None:
        if channel.failure:  # rank 0's other thread has noticed
            raise RankError(channel.failure)
        if time.monotonic() > end:
            raise RuntimeError("timed out")
        if peers.failed():
            raise RuntimeError("NCCL has lost another rank")

    return alive


def within(seconds: float, work: Callable[[], T]) -> T:
    """Do work for which NCCL has no time limit, or raise RuntimeError; its thread is then left."""
    done = Future[T]()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return done.result(seconds)
    except TimeoutError:
        raise RuntimeError("timed out") from None
