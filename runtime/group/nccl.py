"""The NCCL group of the GPUs that share a model, one for each rank.

Rank 0's messages are sent with gloo, as on CPUs (`channel.py`). NCCL's kernels wait for ever if
another rank has ended. So the host checks for errors while it waits for the GPU, and aborts.

With `--allreduce-strategy one-shot` ranks sum through memory that all GPUs share. A kernel waits
for the signals of all ranks, so the host that notices a lost rank sets the signals itself.
"""

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType
from torch.distributed.distributed_c10d import _abort_process_group

from mtpbuild.runtime.contract.sums import BLOCKS, BYTES, CALLS, PROGRAMS, RANKS
from mtpbuild.runtime.errors import EngineError, RankError, take_first_line
from mtpbuild.runtime.gpu.torch_cuda import Gpu
from mtpbuild.runtime.group.channel import GRACE, Channel, silence, use_in_programs
from mtpbuild.runtime.group.start import count_ranks_on_machine, environment
from mtpbuild.runtime.threads import start_daemon

SETTINGS = {
    # 2: NCCL's watchdog aborts a collective that hangs, but not the process, as torchrun's default
    # would. This also frees a host that is blocked by a full launch queue. Nothing is dumped.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # 1 would make the host query an event after each collective, which can't be captured.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # A prompt's collectives are not captured and may be queued after a captured step, on the same
    # communicator. NCCL's default allows this, but a machine's own settings may not.
    "NCCL_GRAPH_MIXING_SUPPORT": "1",
}
T = TypeVar("T")
FAR = 1 << 30  # calls ahead; no rank makes this many before it leaves
ADVICE = "build it with `--allreduce-strategy nccl`"
ABORTING = 10.0  # seconds that an abort may take


class Peers:
    """The process group of all ranks' GPUs; all ranks create it together."""

    backend = "nccl"

    def __init__(self, device: torch.device, limit: float) -> None:
        self._device = device
        group = dist.new_group(backend=self.backend, timeout=timedelta(seconds=limit))
        assert isinstance(group, dist.ProcessGroup)
        self.group = group
        self._kept: Any = None  # keeps shared memory alive

    def share(self, size: int) -> tuple[Tensor, list[int]]:
        """Allocate bytes that all GPUs can access; return them, and the address of each rank's."""
        from torch.distributed import _symmetric_memory as symmetric

        with torch.cuda.device(self._device):
            memory = symmetric.empty(size, dtype=torch.uint8, device=self._device)
            handle = symmetric.rendezvous(memory, self.group)
        self._kept = memory, handle
        offset = memory.data_ptr() - handle.buffer_ptrs[handle.rank]  # in each rank's allocation
        return memory, [address + offset for address in handle.buffer_ptrs]

    def failed(self) -> bool:
        """Tell whether NCCL has lost a rank; sums then end early with undefined results."""
        return self.group._get_backend(self._device).get_error() != ErrorType.SUCCESS

    def abort(self) -> None:
        """Abort all collectives without waiting for other ranks."""
        with contextlib.suppress(RuntimeError, ValueError):  # ValueError: the group is gone
            run_within(ABORTING, partial(_abort_process_group, self.group))


def connect(gpu: Gpu, channel: Channel, make_peers: type[Peers] = Peers) -> Peers:
    """Connect all ranks' GPUs by a first sum, which creates NCCL's only communicator.

    torch and NCCL read SETTINGS when they create it.
    """
    with channel.unbroken(), environment(SETTINGS):
        dist.barrier()  # fails here if a rank found no GPU; NCCL would wait for it
        peers = make_peers(gpu.device, GRACE * channel.limit)
        channel.leaving.append(peers.abort)
        use_in_programs(peers.group)
        alive = watch(channel, peers)

        def meet() -> None:
            gpu.run(lambda: dist.all_reduce(torch.ones(1, device=gpu.device), group=peers.group))
            gpu.settle(alive)

        with silence:
            run_within(channel.patience, meet)
    return peers


class Connected(Protocol):
    """The part of a GPU connection that is polled while GPUs compute."""

    def failed(self) -> bool: ...


def watch(channel: Channel, peers: Connected) -> Callable[[], None]:
    """Return a check to call while a GPU computes; it raises at timeout or if a rank is lost."""
    end = time.monotonic() + channel.patience

    def alive() -> None:
        if channel.failure:  # found by rank 0's keep-alive thread
            raise RankError(channel.failure)
        if time.monotonic() > end:
            raise RuntimeError("timed out")
        if peers.failed():
            raise RuntimeError("NCCL has lost another rank")

    return alive


def run_within(seconds: float, work: Callable[[], T]) -> T:
    """Run work in a thread; at timeout raise RuntimeError and leave the thread running."""
    try:
        return start_daemon(work).result(seconds)
    except TimeoutError:
        raise RuntimeError("timed out") from None


def share_memory(gpu: Gpu, channel: Channel, peers: Peers) -> Tensor:
    """Share memory between the ranks' GPUs; all ranks call it together.

    Returns the constant for one-shot sums, [ranks + 1] int64 on the GPU: the address of each
    rank's memory, then this rank's number.
    """
    here = count_ranks_on_machine(channel.ranks)
    if here < channel.ranks:
        raise EngineError(
            f"one-shot sums need all {channel.ranks} ranks on one machine, it has {here}: {ADVICE}"
        )
    try:
        memory, addresses = run_within(channel.patience, partial(peers.share, BYTES))
    except (AttributeError, ImportError, RuntimeError) as error:
        raise EngineError(
            f"one-shot sums need GPUs that see each other's memory ({take_first_line(error)}): "
            f"{ADVICE}"
        ) from None
    gpu.run(partial(release, memory))  # loads its kernel now: a hanging GPU could not load it
    gpu.run(memory.zero_)
    gpu.settle(lambda: None)
    with channel.unbroken():
        dist.barrier()  # no rank may signal before all memories are zeros
    channel.leaving.append(partial(_free, gpu, memory))
    return torch.tensor([*addresses, channel.rank], device=gpu.device)


def release(memory: Tensor) -> None:
    """Set all signals in this rank's memory far ahead, so that its kernels stop waiting."""
    signals = memory[:CALLS].view(torch.int32).view(PROGRAMS, RANKS)
    calls = memory[CALLS:BLOCKS].view(torch.int32)[:, None]
    torch.add(calls.expand_as(signals), FAR, out=signals)  # no allocation: that might block


def _free(gpu: Gpu, memory: Tensor) -> None:
    with contextlib.suppress(RuntimeError):  # after an error of the GPU nothing can be freed
        gpu.aside(partial(release, memory))
