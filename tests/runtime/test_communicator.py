"""NCCL called directly, and a GPU that is one of several: what is asked of them, how they fail."""

import contextlib
import ctypes
import json
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mtpbuild.runtime.contract.controls import GREEDY, StepControls
from mtpbuild.runtime.errors import EngineError, MissingDependencyError, RankError
from mtpbuild.runtime.gpu.cuda import Device, visible_gpus
from mtpbuild.runtime.group import communicator
from mtpbuild.runtime.group.channel import _decode_value, _encode_value
from mtpbuild.runtime.group.communicator import CAPSULE, Communicator, UniqueId, join
from mtpbuild.runtime.group.nccl import watch
from tests.support.fake_cuda import FakeCuda
from tests.support.stand_ins import failing, importing

HANDLE = 0xBEEF


class Library:
    """NCCL's functions as ctypes calls them; `fails` maps a name to the code that it returns."""

    def __init__(self, **fails: int) -> None:
        self.called = list[tuple[Any, ...]]()
        self.fails, self.lost = fails, 0
        self.ncclGetErrorString: Any = lambda code: f"error {code.value}".encode()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nccl"):
            raise AttributeError(name)
        return lambda *arguments: self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> int:
        if name == "ncclGetUniqueId":
            arguments[0]._obj.bytes[:] = range(128)
        elif name == "ncclCommInitRank":
            handle, ranks, unique, rank = arguments
            assert isinstance(unique, UniqueId), "it is passed by value"
            handle._obj.value = HANDLE
            assert os.environ["NCCL_GRAPH_MIXING_SUPPORT"] == "1"
            self.called.append((ranks.value, rank.value, list(unique.bytes)))
        elif name == "ncclCommGetAsyncError":
            arguments[1]._obj.value = self.lost
        elif name == "ncclCommAbort":
            self.called.append(("abort", arguments[0].value))
        return self.fails.get(name, 0)


class FakeChannel:
    """One of two ranks; what both give is known."""

    ranks, patience, failure = 2, 5.0, None

    def __init__(self, rank: int) -> None:
        self.rank, self.leaving, self.unbroken = rank, list[Any](), contextlib.nullcontext

    def gather(self, own: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        assert own.any() == (self.rank == 0), "the id is rank 0's"
        return np.stack([np.arange(128, dtype=np.uint8), np.zeros(128, np.uint8)])


@pytest.fixture
def gpu() -> Iterator[FakeCuda]:
    fake = FakeCuda((10, 0), gpus=2)
    with importing({"cuda.bindings.runtime": fake}):
        yield fake


@pytest.mark.parametrize("rank", [0, 1])
def test_meeting(rank: int, gpu: FakeCuda) -> None:
    library, channel = Library(), FakeChannel(rank)
    made = join(Device("tensorrt", rank), channel, lambda: library)  # type: ignore[arg-type]
    assert library.called == [(2, rank, list(range(128)))]
    assert rank in gpu.current.values(), "on its GPU, in the thread that waits"
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    assert pointer(made.capsule, CAPSULE) == HANDLE
    assert not made.failed()
    library.lost = 3
    assert made.failed()
    channel.leaving.pop()()
    made.abort()
    assert library.called[1:] == [("abort", HANDLE)], "once"


def test_what_nccl_says() -> None:
    made = Communicator(Library(ncclGetUniqueId=2), 0, 2)
    with pytest.raises(EngineError, match=r"^ncclGetUniqueId failed: error 2$"):
        made.invite()


def test_no_library() -> None:
    missing = failing(ctypes, "CDLL", OSError("libnccl.so.2: cannot open"))
    says = r"need NCCL \(libnccl.so.2\): pip install nvidia-nccl-cu13"
    with missing, pytest.raises(MissingDependencyError, match=says):
        communicator.load_nccl()


def test_a_gpu_of_several(gpu: FakeCuda) -> None:
    """Each thread's calls go to the rank's own."""
    assert visible_gpus("tensorrt") == 2
    device = Device("tensorrt", 1)
    found = list[str]()
    other = threading.Thread(target=lambda: found.append(device.compute_capability))
    other.start()
    other.join()
    assert found == ["10.0"]
    assert set(gpu.current.values()) == {1}
    with pytest.raises(EngineError, match=r"^GPU 2 is asked for, CUDA finds 2 \(numbered from 0\)"):
        Device("tensorrt", 2)


def test_waiting_for_a_gpu(gpu: FakeCuda) -> None:
    """A rank waits as long as the others are there."""
    device, asked = Device("tensorrt"), list[int]()
    gpu.busy = 4
    device.settle(lambda: asked.append(gpu.busy))
    assert asked == [3, 2, 1, 0]
    gpu.busy = 4
    channel: Any = SimpleNamespace(failure="rank 1 is gone", patience=1)
    with pytest.raises(RankError, match="rank 1 is gone"):
        device.settle(watch(channel, SimpleNamespace(failed=lambda: False)))


@pytest.mark.parametrize(
    "controls",
    [GREEDY, StepControls(temperature=0.8, banned_ids=(3, 5), banned_until=9),
     StepControls(rule={"typical": True, "typical_epsilon": 0.3})],
)  # fmt: skip
def test_controls_reach_other_ranks_as_they_are(controls: StepControls) -> None:
    output = json.dumps(["begin", 0, controls], default=_encode_value)
    *_, received = json.loads(output, object_hook=_decode_value)
    assert received == controls
    assert received.plain == controls.plain
