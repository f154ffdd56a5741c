"""Runs ranks of target tensorrt on fakes: real processes, each with a GPU in the host's memory.

`python -m tests.support.trt_ranks` is a rank that another process started.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import Programs
from mtpbuild.runtime.group import start as ranks
from mtpbuild.runtime.group.channel import Channel
from mtpbuild.runtime.programs import follow, tensorrt
from tests.support.eager_ranks import visible_gpus as visible_gpus
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_tensorrt import FakeTensorRt
from tests.support.fake_torch_tensorrt import FakeNccl, installed
from tests.support.registry import registered

ROOT = Path(__file__).parents[2]


def fake() -> FakeTensorRt:
    """Make one process's TensorRT, on its GPU, with its end of NCCL."""
    gpu = FakeCuda((10, 0), gpus=visible_gpus())
    return FakeTensorRt(gpu, FakeNccl())


def load(
    folder: Path, manifest: Manifest, threads: int | None, channel: Channel | None = None
) -> Programs:
    """Stand in for target tensorrt's `load`."""
    trt = sys.modules["tensorrt"]
    assert isinstance(trt, FakeTensorRt)
    return tensorrt.load(folder, manifest, threads, channel, nccl=lambda: trt.nccl)


@contextlib.contextmanager
def machine() -> Iterator[FakeTensorRt]:
    """Let this process build and load engines on fakes."""
    trt = fake()
    with installed(trt), registered("tensorrt", programs=__name__):
        yield trt


@contextlib.contextmanager
def used() -> Iterator[FakeTensorRt]:
    """Do the same in the processes that this one starts."""
    torch.set_num_threads(1)
    with machine() as trt, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "FOLLOWER", (sys.executable, "-m", "tests.support.trt_ranks"))
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv(ranks.TIMEOUT, "30")
        yield trt


if __name__ == "__main__":
    torch.set_num_threads(1)
    with registered("tensorrt", programs="tests.support.trt_ranks"), machine():
        sys.exit(follow.run_follower(*sys.argv[1:]))
