"""Engines whose model is shared by GPUs: which one a rank takes, its group, how ranks end.

Two processes with fake GPUs that gloo connects in NCCL's place, programs run eagerly
(`tests/support/eager_ranks.py`). What the compiler is given is in `test_gpu_graph.py`.
"""

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.runtime import EngineError
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import Manifest, read_manifest
from mtpbuild.runtime.errors import RankError
from mtpbuild.runtime.gpu.torch_cuda import Gpu
from mtpbuild.runtime.group import nccl
from mtpbuild.runtime.group import start as ranks_module
from mtpbuild.runtime.group.lead import LeadingPrograms
from mtpbuild.runtime.group.nccl import SETTINGS, connect, run_within, watch
from mtpbuild.runtime.programs.inductor_cuda import CudaRankPrograms
from tests.reference.recompute import greedy
from tests.reference.sampling import check_texts
from tests.support import collectives, eager_ranks, rank_bugs
from tests.support.checkpoints import make_predictable, save_checkpoint
from tests.support.collectives import agreed
from tests.support.fake_gpu import torch_finds
from tests.support.invoke import invoke
from tests.support.rank_engines import (
    GREEDY,
    HOT,
    PROMPT,
    SHAPE,
    followers,
    make,
    running,
)

pytestmark = [
    pytest.mark.xdist_group("inductor"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch's own, in export and gloo
]


@pytest.fixture(scope="module")
def model() -> PlainDeepseek:
    return make_predictable(**SHAPE)


def engine_on_gpus(folder: Path, model: PlainDeepseek, **flags: Any) -> Iterator[Path]:
    """Yield an engine of two ranks."""
    pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
    with eager_ranks.on_gpus():
        checkpoint = save_checkpoint(folder / "shared", model, **SHAPE)
        yield make(checkpoint, folder / "engine", nextn=1, tp=2, device="cuda", **flags)


@pytest.fixture(scope="module")
def engine(model: PlainDeepseek, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from engine_on_gpus(tmp_path_factory.mktemp("gpus"), model, ep=2, max_batch=2)


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder to which ranks write what they have captured and summed."""
    monkeypatch.setenv(collectives.LOGS, str(tmp_path))
    return tmp_path


@pytest.mark.full
def test_tokens(engine: Path, model: PlainDeepseek, logs: Path) -> None:
    """O2: greedy and sampled, two at once; a step is a graph, launched before the last is read."""
    manifest = read_manifest(engine)
    assert (manifest.build.tp, manifest.build.ep) == (2, 2)
    assert manifest.target.compute_capabilities == ("9.0",)
    with running(engine) as loaded:
        leading = loaded._loaded.loop.programs
        assert isinstance(leading, LeadingPrograms)
        assert Feature.OVERLAP in leading.features
        check_texts(loaded, model, [PROMPT, [5], PROMPT], [GREEDY, GREEDY, HOT])
        own: Any = leading._calls._programs
        steps = own._gpu.replays
        assert own._gpu.queue, "the last step is one too many"
    assert isinstance(own, CudaRankPrograms)
    assert not followers()

    lines = agreed(logs)
    captures = [line for line in lines if "capture" in line]
    sums = sums_of_a_step(manifest)
    assert captures == [
        f"at once: capture {i} of {sums} sums, {program} of {slots}: "
        f"sum of [{slots}, 2, 32] float32 first"
        for i, (program, slots) in enumerate(itertools.product(("decode", "decode_mixed"), (1, 2)))
    ]
    assert sum(line.startswith("graph ") for line in lines) == steps * sums
    at_once = [line for line in lines if "at once: decode" in line]
    assert len(at_once) == 4 * sums, "they were run before they were captured, and never again"


@pytest.fixture(scope="module")
def one_shot_engine(
    model: PlainDeepseek, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("one_shot")
    yield from engine_on_gpus(folder, model, allreduce_strategy="one-shot")


@pytest.mark.full
def test_tokens_of_one_shot_sums(one_shot_engine: Path, model: PlainDeepseek, logs: Path) -> None:
    """Ranks share the host's memory, and the kernel sums in Triton's interpreter."""
    manifest = read_manifest(one_shot_engine)
    assert manifest.target.allreduce_strategy == "one-shot"
    with running(one_shot_engine) as loaded:
        for params in (GREEDY, HOT):
            check_texts(loaded, model, [PROMPT], [replace(params, max_tokens=6)])
    lines = agreed(logs)
    graphs = [line for line in lines if line.startswith("graph ")]
    assert graphs
    assert all(": one-shot sum of" in line for line in graphs)
    assert not any(": sum of" in line for line in lines)


def sums_of_a_step(manifest: Manifest) -> int:
    """Count four of a pass (attention, feed-forward, embedding, head), and a draft's projection."""
    drafts = manifest.build.nextn
    return 4 * (1 + drafts) + drafts


@pytest.mark.full
def test_without_graphs(engine: Path, model: PlainDeepseek, logs: Path) -> None:
    """Rank 0 says so, and the other one does it too."""
    with running(engine, no_cuda_graphs=True) as loaded:
        assert loaded.generate(PROMPT, GREEDY).token_ids == greedy(model, PROMPT, 16)
    assert all(line.startswith("at once: ") for line in agreed(logs))


@pytest.mark.full
@pytest.mark.parametrize(
    ("bug", "here", "there"),
    [
        (
            "captures_in_another_order",
            "at once: decode of 1: sum",
            "at once: decode_mixed of 1: sum",
        ),
        ("captures_nothing", "at once: capture 0 of 9 sums", "at once: decode of 2: sum"),
        ("computes_one_slot_more", "graph 0: decode of 1", "graph 1: decode of 2"),
        ("runs_prompts_behind_steps", "at once: prefill", "graph 0: decode of 1"),
    ],
)
def test_a_bug_in_the_order_is_caught(
    bug: str, here: str, there: str, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(rank_bugs.BUG, bug)
    monkeypatch.setenv(ranks_module.TIMEOUT, "6")
    code, out, err = invoke("run", "--engine", engine, "--prompt-ids", "5,7,9,11,3,2")
    assert (code, out) == (1, "")
    assert err.startswith(f"error: rank 0 of 2: '{here}"), err
    assert f" here, '{there}" in err
    assert err.endswith(" on rank 1\n")


@pytest.mark.full
def test_a_follower_without_its_gpu(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has joined, so rank 0 is told, and says that line."""
    monkeypatch.setenv(eager_ranks.TAKEN, "1")
    code, out, err = invoke("run", "--engine", engine, "--prompt-ids", "5")
    assert (code, out) == (1, "")
    assert err == "error: rank 1: GPU 1 is taken\n"


def test_which_gpu_a_rank_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert ranks_module.find_own_gpu() == 3
    says = r"^GPU 3 is asked for, torch finds 2 \(numbered from 0\)$"
    with torch_finds(2), pytest.raises(EngineError, match=says):
        Gpu(3)
    for text in ("", "first", "-1"):
        monkeypatch.setenv("LOCAL_RANK", text)
        with pytest.raises(EngineError, match=f"which GPU this rank takes, not '{text}': start"):
            ranks_module.find_own_gpu()


def test_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """One communicator, NCCL's; what is set while it is made; NCCL's own errors count."""
    made = list[tuple[str, timedelta]]()
    seen = list[dict[str, str | None]]()
    state = SimpleNamespace(error=ErrorType.SUCCESS)

    def note() -> None:
        seen.append({name: os.environ.get(name) for name in SETTINGS})

    class Group(dist.ProcessGroup):
        def __init__(self) -> None:
            super().__init__(0, 1)  # type: ignore[call-arg]  # the stub lacks this one

        def _get_backend(self, device: torch.device) -> Any:
            assert device == torch.device("cuda", 1)
            return SimpleNamespace(get_error=lambda: state.error)

    def new_group(backend: str, timeout: timedelta) -> Group:
        made.append((backend, timeout))
        note()
        return Group()

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(nccl, "use_in_programs", lambda group: None)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun does
    monkeypatch.setenv("NCCL_GRAPH_MIXING_SUPPORT", "0")  # of somebody who captures all
    gpu: Any = SimpleNamespace(
        device=torch.device("cuda", 1), run=lambda work: note(), settle=lambda alive: alive()
    )
    channel: Any = SimpleNamespace(
        unbroken=contextlib.nullcontext, limit=7.0, patience=7.0, leaving=[], failure=None
    )
    peers = connect(gpu, channel)
    assert made == [("nccl", timedelta(seconds=10.5))]
    assert seen == [SETTINGS, SETTINGS], "also at the first sum, where NCCL reads its own"
    assert SETTINGS["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert os.environ["NCCL_GRAPH_MIXING_SUPPORT"] == "0"
    assert channel.leaving == [peers.abort]
    assert not peers.failed()
    state.error = ErrorType.COMM_ERROR
    assert peers.failed()
    peers.abort()  # torch knows no such group


def test_waiting_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank waits as long as the others are there; it asks last when the GPU is done."""
    channel: Any = SimpleNamespace(failure=None, patience=0.2)
    peers: Any = SimpleNamespace(failed=lambda: False)
    asked, done = list[int](), [False, False, True]
    event = SimpleNamespace(query=lambda: done.pop(0), record=lambda stream: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)

    class Waiting(Gpu):
        def __init__(self) -> None:
            self._stream: Any = None

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
        run_within(0.05, hold.wait)
    hold.set()
    with pytest.raises(ZeroDivisionError):
        run_within(5, lambda: print(1 // 0))
    run_within(5, lambda: None)
