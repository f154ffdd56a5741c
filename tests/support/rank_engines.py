"""Builds and starts engines of several ranks for tests, and looks for their processes."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder.compiler.build import BuiltEngine
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.errors import RankError
from mtpbuild.runtime.group.start import TIMEOUT, start_ranks
from tests.support.requests import build, build_request

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "num_hidden_layers": 1, "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
CHUNK, NEXTN = 4, 2
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
HOT = replace(GREEDY, temperature=0.8, top_p=0.95, seed=5)
RELAXED = replace(
    GREEDY,
    relaxed_topk=5,
    relaxed_delta=0.5,
    begin_thinking_phase_token=62,
    end_thinking_phase_token=63,
)
PROMPT = [62, 7, 9, 11, 13, 2]


def make(checkpoint: Path, out: Path, nextn: int = NEXTN, **flags: Any) -> Path:
    return request_and_build(checkpoint, out, nextn, **flags).folder


def request_and_build(checkpoint: Path, out: Path, nextn: int = NEXTN, **flags: Any) -> BuiltEngine:
    given: dict[str, Any] = {"drafter": "mtp-eagle", "prefill_chunk": CHUNK, "target": "inductor"}
    (built,) = build(build_request(checkpoint, (nextn,), out=out, **given | flags))
    return built


@contextlib.contextmanager
def running(folder: Path, **options: Any) -> Iterator[Engine]:
    with (
        start_ranks(folder, read_manifest(folder), threads=1),
        Engine.load(folder, threads=1, **options) as loaded,
    ):
        yield loaded


def followers() -> list[int]:
    """List the process ids of the ranks that this process has started and not yet waited for."""
    tasks = Path("/proc/self/task").iterdir()
    children = " ".join((task / "children").read_text() for task in tasks).split()
    found = [int(child) for child in children]
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in found}
    return [pid for pid, line in lines.items() if b"_ranks" in line or b".follow" in line]


def check_death(
    engine: Path, number: signal.Signals, patience: int, patch: pytest.MonkeyPatch
) -> None:
    """Check that an engine ends with its line, and soon, when a follower dies or hangs."""
    patch.setenv(TIMEOUT, str(patience))
    silent = f"^rank 0 of 2: another rank has not answered for {patience} s$"
    says = "^rank 1 was killed by signal 9$" if number == signal.SIGKILL else silent
    assert seconds_to_notice(engine, number, says) < patience + 6


def seconds_to_notice(engine: Path, number: signal.Signals, says: str) -> float:
    """Signal a follower in the middle of a request; return how long the engine lives on."""
    times = list[float]()

    def generate(loaded: Engine) -> None:
        stream = loaded.stream(PROMPT, replace(GREEDY, max_tokens=200))
        next(stream)
        os.kill(followers()[0], number)
        times.append(time.monotonic())
        stream.result()

    with pytest.raises(RankError, match=says), running(engine) as loaded:
        generate(loaded)
    assert not followers()
    return time.monotonic() - times[0]
