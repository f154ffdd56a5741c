"""Lets GPUs sum by memory that all of them see, beside NCCL: `--allreduce-strategy one-shot`.

A kernel waits for the other ranks, for ever if one is gone; so the host, which asks while it waits,
tells it in their place (docs/distributed.md).
"""

import contextlib
import os
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from mtpbuild.runtime.contract.sums import BLOCKS, BYTES, CALLS, PROGRAMS, RANKS
from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.group.channel import Channel
from mtpbuild.runtime.group.nccl import Peers, within
from mtpbuild.runtime.programs.torch_cuda import Gpu

FAR = 1 << 30  # calls, which nobody makes before a rank leaves
ADVICE = "build it with --allreduce-strategy nccl"


def share(gpu: Gpu, channel: Channel, peers: Peers) -> Tensor:
    """Returns what programs with one-shot sums are told, [ranks + 1] int64, on the GPU.

    All ranks call it at the same time.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", str(channel.ranks)))
    if here < channel.ranks:
        raise EngineError(
            f"one-shot sums need all {channel.ranks} ranks on one machine, it has {here}: {ADVICE}"
        )
    try:
        memory, addresses = within(channel.patience, partial(peers.share, BYTES))
    except (AttributeError, ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise EngineError(
            f"one-shot sums need GPUs that see each other's memory ({reason}): {ADVICE}"
        ) from None
    gpu.run(partial(release, memory))  # once, so that its code is loaded when it matters
    gpu.run(memory.zero_)
    gpu.settle(lambda: None)
    with channel.unbroken():
        dist.barrier()  # nobody tells anybody anything before all are zeros
    channel.leaving.append(partial(_free, gpu, memory))
    return torch.tensor([*addresses, channel.rank], device=gpu.device)


def release(memory: Tensor) -> None:
    """Tell all kernels of this rank, in every rank's place, of calls far ahead."""
    signals = memory[:CALLS].view(torch.int32).view(PROGRAMS, RANKS)
    calls = memory[CALLS:BLOCKS].view(torch.int32)[:, None]
    torch.add(calls.expand_as(signals), FAR, out=signals)  # takes no memory, which might wait


def _free(gpu: Gpu, memory: Tensor) -> None:
    with contextlib.suppress(RuntimeError):
        gpu.aside(partial(release, memory))
