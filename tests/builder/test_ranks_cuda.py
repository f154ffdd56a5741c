"""Engines whose model is shared by GPUs: which one a rank takes, its group, how ranks end.

Two processes with fake GPUs that gloo connects in NCCL's place, programs run eagerly
(`tests/support/eager_ranks.py`). What the compiler is given is in `test_gpu_graph.py`.
"""

import os
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from mtpbuild.builder.models.deepseek_v3.reference import Transformer
from mtpbuild.runtime import Engine, EngineError
from mtpbuild.runtime.controls import Controls
from mtpbuild.runtime.errors import RankError
from mtpbuild.runtime.group import start as ranks_module
from mtpbuild.runtime.group.nccl import Peers, watch, within
from mtpbuild.runtime.manifest import read_manifest
from mtpbuild.runtime.programs.inductor_ranks import CudaRankPrograms
from mtpbuild.runtime.programs.torch_cuda import Gpu
from tests.reference.recompute import greedy
from tests.reference.sampling import sample
from tests.support import eager_ranks
from tests.support.checkpoints import make_predictable, save_checkpoint
from tests.support.fake_gpu import torch_finds
from tests.support.fake_target import in_place_of
from tests.support.invoke import invoke
from tests.support.rank_engines import (
    GREEDY,
    HOT,
    PROMPT,
    SHAPE,
    followers,
    make,
    running,
    seconds_to_notice,
)

pytestmark = [
    pytest.mark.xdist_group("inductor"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch's own, in export and gloo
]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return make_predictable(**SHAPE)


@pytest.fixture(scope="module")
def engine(model: Transformer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
    folder = tmp_path_factory.mktemp("gpus")
    with (
        eager_ranks.in_place_of_the_compiler(),
        in_place_of("inductor", compute_capabilities=lambda request, options: ("9.0",)),
    ):
        checkpoint = save_checkpoint(folder / "shared", model, **SHAPE)
        flags: dict[str, Any] = {"tp": 2, "ep": 2, "device": "cuda", "max_batch": 2}
        yield make(checkpoint, folder / "engine", nextn=1, **flags)


def test_tokens(engine: Path, model: Transformer) -> None:
    """O2: greedy and sampled, two at once; a step is a graph, and the next is launched before it is read."""
    manifest = read_manifest(engine)
    assert (manifest.build.tp, manifest.build.ep) == (2, 2)
    assert manifest.target.compute_capabilities == ("9.0",)
    asked, params = [PROMPT, [5], PROMPT], [GREEDY, GREEDY, HOT]
    with running(engine) as loaded:
        own = loaded._loop.programs._own  # type: ignore[attr-defined]
        results = loaded.generate(asked, params)
        assert own._gpu.captures == 4  # both programs, for one slot and two
        assert own._gpu.replays > 0
    assert isinstance(own, CudaRankPrograms)
    drawn = Controls(temperature=0.8, top_p=0.95, seed=5)
    assert results[0].token_ids == greedy(model, PROMPT, 16)
    assert results[1].token_ids == greedy(model, [5], 16)
    assert results[2].token_ids == sample(model, PROMPT, 16, drawn)
    assert not followers()


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGKILL, "^rank 1 was killed by signal 9$"),
        (signal.SIGSTOP, "^rank 0 of 2: another rank has not answered for 3 s$"),
    ],
)
def test_a_rank_that_dies_or_hangs(
    number: signal.Signals, says: str, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ranks_module.TIMEOUT, "3")
    assert seconds_to_notice(engine, number, says) < 9


def test_where_it_does_not_run(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(eager_ranks.GPUS, "1")
    code, _, err = invoke("run", "--engine", engine, "--prompt-ids", "5")
    assert (code, err) == (
        2,
        f"error: {engine}: 2 ranks need a GPU each, this machine has 1: spread them over machines "
        "with torchrun\n",
    )
    with pytest.raises(EngineError, match=r"of 2 ranks: use `mtpbuild run`, or .*per-node 2`$"):
        Engine.load(engine)
    (engine / "rank1").rename(engine / "elsewhere")
    with pytest.raises(EngineError, match=r"--target inductor .*--ep 2 --device cuda --rank 1"):
        ranks_module.require_ranks(engine, read_manifest(engine), [1])
    (engine / "elsewhere").rename(engine / "rank1")


def test_a_follower_without_its_gpu(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has joined, so rank 0 is told, and says that line."""
    monkeypatch.setenv(eager_ranks.TAKEN, "1")
    code, out, err = invoke("run", "--engine", engine, "--prompt-ids", "5")
    assert (code, out) == (1, "")
    assert err == "error: rank 1: GPU 1 is taken\n"


def test_which_gpu_a_rank_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert ranks_module.own_gpu() == 3
    says = r"^GPU 3 is asked for, torch finds 2 \(numbered from 0\)$"
    with torch_finds(2), pytest.raises(EngineError, match=says):
        Gpu(3)
    for text in ("", "first", "-1"):
        monkeypatch.setenv("LOCAL_RANK", text)
        with pytest.raises(EngineError, match=f"which GPU this rank takes, not '{text}': start"):
            ranks_module.own_gpu()


def test_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's, whose watchdog leaves the process alone; NCCL's own errors count."""
    made = list[tuple[str, timedelta, str | None]]()
    state = SimpleNamespace(error=ErrorType.SUCCESS)

    class Group(dist.ProcessGroup):
        def __init__(self) -> None:
            super().__init__(0, 1)  # type: ignore[call-arg]  # the stub lacks this one

        def _get_backend(self, device: torch.device) -> Any:
            assert device == torch.device("cuda", 1)
            return SimpleNamespace(get_error=lambda: state.error)

    def new_group(backend: str, timeout: timedelta) -> Group:
        made.append((backend, timeout, os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")))
        return Group()

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun does
    peers = Peers(torch.device("cuda", 1), 7.0)
    assert made == [("nccl", timedelta(seconds=7), "2")]
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert not peers.failed()
    state.error = ErrorType.COMM_ERROR
    assert peers.failed()
    peers.abort()  # torch knows no such group


def test_waiting_for_a_gpu() -> None:
    """A rank waits as long as the others are there; it asks last when the GPU is done."""
    channel: Any = SimpleNamespace(failure=None, patience=0.2)
    peers: Any = SimpleNamespace(failed=lambda: False)
    asked, done = list[int](), [False, False, True]
    event = SimpleNamespace(query=lambda: done.pop(0))

    class Waiting(Gpu):
        def __init__(self) -> None: ...

        def _event(self) -> Any:
            return event

    gpu = Waiting()
    gpu.settle(lambda: asked.append(len(done)))
    assert asked == [2, 1, 0]
    event.query = lambda: False
    with pytest.raises(RuntimeError, match="timed out"):
        gpu.settle(watch(channel, peers))
    peers.failed = lambda: True
    with pytest.raises(RuntimeError, match="NCCL"):
        gpu.settle(watch(channel, peers))
    channel.failure = "rank 1 is gone"
    with pytest.raises(RankError, match=r"^rank 1 is gone$"):
        gpu.settle(watch(channel, peers))


def test_a_meeting_has_a_time_limit() -> None:
    hold = threading.Event()
    with pytest.raises(RuntimeError, match="timed out"):
        within(0.05, hold.wait)
    hold.set()
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: print(1 // 0))
    within(5, lambda: None)
