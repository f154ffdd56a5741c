"""Engines of two ranks on two GPUs, over NCCL and by one-shot sums, and how they end.

Their tokens are those of the plain model.
"""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.lab.measure.runs import run_prompts
from mtpbuild.runtime import Engine
from mtpbuild.runtime.errors import RankError
from mtpbuild.runtime.group.start import TIMEOUT
from tests.reference.recompute import greedy
from tests.support.bfloat16 import check, rounded
from tests.support.checkpoints import make_predictable, save_checkpoint
from tests.support.rank_engines import GREEDY, HOT, PROMPT, SHAPE, make
from tests.support.rank_engines import running as started

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="not two CUDA devices"),
]


@pytest.fixture(scope="module")
def model() -> PlainDeepseek:
    return make_predictable(**SHAPE)


@pytest.fixture(scope="module")
def engine(model: PlainDeepseek, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpus")
    checkpoint = save_checkpoint(folder / "shared", model, **SHAPE)
    return make(checkpoint, folder / "engine", tp=2, ep=2, device="cuda", max_batch=2)


@pytest.fixture(scope="module")
def one_shot(model: PlainDeepseek, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one_shot")
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("the GPUs do not see each other's memory")
    checkpoint = save_checkpoint(folder / "shared", model, **SHAPE)
    flags: dict[str, Any] = {"device": "cuda", "allreduce_strategy": "one-shot", "max_batch": 2}
    return make(checkpoint, folder / "engine", tp=2, ep=2, **flags)


@pytest.fixture(params=["engine", "one_shot"])
def either(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(request.param)
    return folder


@pytest.mark.parametrize("no_cuda_graphs", [False, True])
def test_tokens(either: Path, model: PlainDeepseek, no_cuda_graphs: bool) -> None:
    with started(either, no_cuda_graphs=no_cuda_graphs) as loaded:
        results = loaded.generate([PROMPT, [5], PROMPT], [GREEDY, GREEDY, HOT])
        again = loaded.generate(PROMPT, HOT)
    assert results[0].token_ids == greedy(model, PROMPT, 16)
    assert results[1].token_ids == greedy(model, [5], 16)
    assert results[2].token_ids == again.token_ids


def test_attention_dp(model: PlainDeepseek, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "shared", model, **SHAPE)
    flags: dict[str, Any] = {
        "tp": 2,
        "ep": 2,
        "attention_dp": True,
        "device": "cuda",
        "max_batch": 2,
    }
    with started(make(checkpoint, tmp_path / "engine", **flags)) as loaded:
        results = loaded.generate([PROMPT, [5], PROMPT], GREEDY)
    wanted = [greedy(model, prompt, 16) for prompt in (PROMPT, [5], PROMPT)]
    assert [result.token_ids for result in results] == wanted


def test_bfloat16(tmp_path: Path) -> None:
    exact = rounded(make_predictable(**SHAPE))
    checkpoint = save_checkpoint(tmp_path / "exact", exact, **SHAPE)
    flags: dict[str, Any] = {"tp": 2, "device": "cuda", "dtype": "bfloat16"}
    asked = [PROMPT, [5]]
    with started(make(checkpoint, tmp_path / "engine", **flags)) as loaded:
        check(exact, asked, run_prompts(loaded, asked, [GREEDY] * 2))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs(
    either: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TIMEOUT, "10")
    says = "^rank (1 was killed by signal 9|0 of 2: another rank has not answered for 10 s)$"

    def generate(loaded: Engine) -> None:
        stream = loaded.stream(PROMPT, replace(GREEDY, max_tokens=150))
        next(stream)
        os.kill(follower(), number)
        stream.result()

    with pytest.raises(RankError, match=says), started(either) as loaded:
        generate(loaded)


def follower() -> int:
    """Return the rank that this process has started."""
    tasks = Path("/proc/self/task").iterdir()
    children = " ".join((task / "children").read_text() for task in tasks).split()
    (found,) = [pid for pid in children if b"runtime.follow" in _command(pid)]
    return int(found)


def _command(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
