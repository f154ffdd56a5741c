"""One-shot all-reduce through memory that all GPUs share: `--allreduce-strategy one-shot`.

A kernel waits for the signals of all ranks, so it waits for ever if a rank has ended. The host
notices this while it waits for the GPU, and sets the signals itself (docs/distributed.md).
"""

import contextlib
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from mtpbuild.runtime.contract.sums import BLOCKS, BYTES, CALLS, PROGRAMS, RANKS
from mtpbuild.runtime.errors import EngineError, take_first_line
from mtpbuild.runtime.gpu.torch_cuda import Gpu
from mtpbuild.runtime.group.channel import Channel
from mtpbuild.runtime.group.nccl import Peers, run_within
from mtpbuild.runtime.group.start import count_ranks_on_machine

FAR = 1 << 30  # calls ahead; no rank makes this many before it leaves
ADVICE = "build it with `--allreduce-strategy nccl`"


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
