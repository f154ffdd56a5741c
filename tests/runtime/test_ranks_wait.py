"""While a program waits for another rank, this process's other threads go on."""

import ctypes
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._C import _aoti
from torch._C import _distributed_c10d as c10d

from mtpbuild.runtime.group.channel import GRACE, KEEP_ALIVE, YieldingGroup, use_in_programs
from mtpbuild.runtime.group.start import GROUP
from mtpbuild.runtime.programs.tensorrt_ranks import TensorRtRankPrograms
from mtpbuild.runtime.threads import start_daemon

LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


@pytest.fixture
def pair() -> list[Any]:
    """Two ranks that are threads of this process."""
    store, limit = c10d.HashStore(), timedelta(seconds=3)
    join = partial(dist.ProcessGroupGloo, store, size=2, timeout=limit)
    joining = [start_daemon(partial(join, rank=rank)) for rank in (0, 1)]
    return [group.result(10) for group in joining]


class Begun:
    """Rank 0's group, which says when a sum has begun."""

    def __init__(self, group: Any) -> None:
        self._group, self.begun = group, threading.Event()
        self.rank, self.size = group.rank, group.size

    def allreduce(self, tensors: Any, options: Any) -> Any:
        work = self._group.allreduce(tensors, options)
        self.begun.set()
        return work


def test_a_waiting_program_holds_up_no_other_thread(pair: list[Any]) -> None:
    """A program holds the GIL, so the other rank's thread runs only if the wait releases it."""
    rank_0 = Begun(pair[0])
    group = YieldingGroup(cast(dist.ProcessGroup, rank_0))
    use_in_programs(group)

    def answer() -> bool:
        rank_0.begun.wait()
        return bool(pair[1].allreduce([torch.tensor([10.0, 20.0])]).wait())

    other, sums = start_daemon(answer), torch.tensor([1.0, 2.0])
    program = ctypes.PyDLL(str(LIBRARY))  # its calls keep the GIL, as AOTInductor's do
    point = ctypes.pythonapi.PyCapsule_GetPointer
    point.restype, point.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    x = ctypes.c_void_p(point(_aoti.unsafe_alloc_void_ptrs_from_tensors([sums])[0], None))
    name, summed, waited = GROUP.encode(), ctypes.c_void_p(), ctypes.c_void_p()
    reduce = program.aoti_torch_cpu__c10d_functional_all_reduce_
    assert reduce(x, b"sum", name, ctypes.byref(summed)) == 0
    assert program.aoti_torch_cpu__c10d_functional_wait_tensor(summed, ctypes.byref(waited)) == 0
    assert other.result(10)
    assert sums.tolist() == [11.0, 22.0]


def test_a_pause_shorter_than_the_limit_is_no_failure() -> None:
    """It may begin just before a keep-alive message was due, and end just within the limit."""
    assert KEEP_ALIVE + 1 < GRACE


def test_a_communicator_is_set_when_all_have_loaded() -> None:
    """TensorRT waits for the other ranks without a limit, so the time limit is ours."""
    said, never = list[str](), threading.Event()
    ranks: Any = object.__new__(TensorRtRankPrograms)
    ranks._device, ranks._peers = None, SimpleNamespace(capsule="")
    ranks._channel = SimpleNamespace(
        patience=0.05, gather=lambda own: said.append("all have loaded")
    )
    ranks._connect([SimpleNamespace(join=lambda *given: said.append("joined"))])
    assert said == ["all have loaded", "joined"]
    with pytest.raises(RuntimeError, match="timed out"):
        ranks._connect([SimpleNamespace(join=lambda *given: never.wait())])
    never.set()
