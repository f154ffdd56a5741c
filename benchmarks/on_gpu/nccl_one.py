"""Checks NCCL in a world of one GPU: sums in a compiled program, launched, then captured.

    python benchmarks/on_gpu/nccl_one.py [--smoke] [--rows rows.jsonl]

The program is a dense layer of one rank of two, as `mtpbuild build --tp 2` compiles it. The other
rank is missing, so a sum equals its input. The group is made as an engine's ranks make it.
"""

import os
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from mtpbuild.runtime.gpu.torch_cuda import Gpu
from mtpbuild.runtime.group.channel import Channel
from mtpbuild.runtime.group.nccl import connect, watch
from on_gpu.checks import FAILED, Checks, near, parse_flags
from on_gpu.machine import Machine
from on_gpu.random_model import forget_ranks
from on_gpu.slice_bench import Bench, Eagerly
from on_gpu.slices import small

LIMIT = 3e-2  # for values of about 1, in bfloat16
ON_THE_GPU = ("NCCL's communicator", "sums, launched", "sums, captured", "the group is left")


def alone() -> Channel:
    """Make a group of one rank, which meets on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
    return Channel(0, 1)


def run_over_gloo(checks: Checks, bench: Bench) -> None:
    """Check the program without a GPU: PyTorch runs it, and gloo computes the sums."""
    program, given, wanted = bench.dense_layer()
    forget_ranks()
    dist.destroy_process_group()
    channel = alone()
    eager = Eagerly(program)
    checks.make("sums, over gloo", lambda: near(eager.run(given)[0], wanted, LIMIT), gpu=False)
    channel.close()
    checks.skip(*ON_THE_GPU)


def run_over_nccl(checks: Checks, bench: Bench) -> None:
    program, given, wanted = bench.dense_layer()
    runner = bench.runner(program)
    forget_ranks()
    dist.destroy_process_group()
    channel, device = alone(), Gpu()
    made = []
    if not checks.make(ON_THE_GPU[0], lambda: made.append(connect(device, channel)) or ""):
        return
    alive, got = watch(channel, made[0]), torch.empty_like(wanted)

    def work() -> None:
        got.copy_(runner.run(given)[0])

    def launched() -> str:
        device.run(work)
        device.settle(alive)
        return near(got, wanted, LIMIT)

    def captured() -> str:
        replay = device.capture(work)
        worst = ""
        for _ in range(3):  # between two captured steps, sums of prompts are launched
            got.zero_()
            torch.cuda.synchronize()
            replay()
            device.run(lambda: runner.run(given))
            device.settle(alive)
            worst = near(got, wanted, LIMIT)
        return worst

    if checks.make(ON_THE_GPU[1], launched):
        checks.make(ON_THE_GPU[2], captured)
    checks.make(ON_THE_GPU[3], lambda: channel.close() or "")  # type: ignore[func-returns-value]


def main() -> None:
    checks, flags = parse_flags(__doc__)
    if not flags.smoke and not torch.cuda.is_available():
        checks.say("GPU", FAILED, "torch finds none; --smoke walks through without one")
        checks.end()
    with tempfile.TemporaryDirectory() as scratch:
        case = replace(small((0,)), dtype="bfloat16")
        bench = Bench(
            case, Machine("cpu" if flags.smoke else "cuda"), not flags.smoke, Path(scratch)
        )
        (run_over_gloo if flags.smoke else run_over_nccl)(checks, bench)
    checks.end()


if __name__ == "__main__":
    main()
