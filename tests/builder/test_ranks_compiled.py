"""Compiled engines of several ranks say what the engine of one rank says: O2 and O7."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mtpbuild.builder.plan.plan import DrafterName
from mtpbuild.runtime import Engine
from mtpbuild.runtime.threads import start_daemon
from tests.support.checkpoints import make_predictable, save_checkpoint
from tests.support.engines import EngineBuilder
from tests.support.inductor_engines import compiled_soon
from tests.support.rank_engines import (
    CHUNK,
    GREEDY,
    HOT,
    NEXTN,
    RELAXED,
    SHAPE,
    followers,
    running,
)

pytestmark = [
    pytest.mark.full,
    pytest.mark.xdist_group("inductor"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
DEEPER = SHAPE | {"num_hidden_layers": 2, "num_nextn_predict_layers": 2}
PARAMS = [GREEDY, HOT, replace(HOT, acceptance="rejection"), RELAXED]
MATRIX: list[tuple[int, int, bool, DrafterName]] = [
    (2, 1, False, "mtp-vanilla"),
    (4, 2, False, "mtp-vanilla"),
    (4, 1, False, "mtp-eagle"),
    (2, 2, False, "mtp-eagle"),
    (2, 1, True, "mtp-vanilla"),
    (2, 2, True, "mtp-eagle"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deeper") / "two-layers"
    return save_checkpoint(folder, make_predictable(**DEEPER), **DEEPER)


@pytest.fixture
def make(checkpoint: Path, build_engine: EngineBuilder) -> Iterator[Callable[..., Path]]:
    flags = {"target": "inductor", "prefill_chunk": CHUNK, "max_batch": 3}
    with compiled_soon():
        yield partial(build_engine, checkpoint, NEXTN, **flags)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [[62, *rng.integers(0, 62, n).tolist()] for n in (5, 1, 9, 20)]


@pytest.mark.parametrize(("tp", "ep", "attention_dp", "drafter"), MATRIX)
def test_the_same_tokens_as_one_rank(
    tp: int, ep: int, attention_dp: bool, drafter: DrafterName, make: Callable[..., Path]
) -> None:
    """A batch of greedy, sampled, rejecting and relaxed requests; twice the same."""
    with Engine.load(make(drafter=drafter), threads=1) as loaded:
        wanted = [r.token_ids for r in loaded.generate(prompts(), PARAMS)]
    for _ in range(2):
        with running(make(drafter=drafter, tp=tp, ep=ep, attention_dp=attention_dp)) as loaded:
            results = loaded.generate(prompts(), PARAMS)
        assert [r.token_ids for r in results] == wanted


def test_ranks_that_were_built_apart(make: Callable[..., Path], tmp_path: Path) -> None:
    """Each compiles its own programs, and they agree: other tokens on a rank would end the run."""
    together = tmp_path / "together"
    for rank in (1, 0):
        alone = make(drafter="mtp-vanilla", tp=2, ep=1, rank=rank)
        shutil.copytree(alone, together, dirs_exist_ok=True)
    files = [together / f"rank{rank}" / "decode.pt2" for rank in range(2)]
    assert not files[0].samefile(files[1])
    with Engine.load(make(drafter="mtp-vanilla"), threads=1) as loaded:
        wanted = [r.token_ids for r in loaded.generate(prompts(), PARAMS)]
    with running(together) as loaded:
        assert [r.token_ids for r in loaded.generate(prompts(), PARAMS)] == wanted


def test_torchrun(make: Callable[..., Path]) -> None:
    """It starts the ranks and they join; only one of them prints."""
    engine = make(drafter="mtp-vanilla", tp=2, ep=1)
    with running(engine) as loaded:
        wanted = loaded.generate(prompts()[0], GREEDY).token_ids
    code = "from mtpbuild.builder.cli import app; app()"
    ids = ",".join(map(str, prompts()[0]))
    flags = "--prompt-ids", ids, "--max-tokens", "16", "--ignore-eos", "--threads", "1", "--json"
    torchrun = "torch.distributed.run", "--nproc-per-node", "2", "--no-python"
    run = sys.executable, "-c", code, "run", "--engine", str(engine), *flags
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, *run], capture_output=True, text=True, check=True
    )
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["token_ids"] == wanted


def test_short_pauses(make: Callable[..., Path]) -> None:
    """A rank that is paused while steps run, and goes on, is waited for.

    A thread of rank 0's process lets it go on, so the programs there must not stop all threads.
    """
    busy = replace(GREEDY, max_tokens=100)
    with running(make(drafter="mtp-vanilla", tp=2, ep=1)) as loaded:
        wanted, (follower,) = loaded.generate(prompts()[0], busy).token_ids, followers()

        def pause() -> None:
            for _ in range(6):
                os.kill(follower, signal.SIGSTOP)
                time.sleep(0.2)
                os.kill(follower, signal.SIGCONT)
                time.sleep(0.05)

        pauses = start_daemon(pause)
        while not pauses.done():
            assert loaded.generate(prompts()[0], busy).token_ids == wanted
        assert loaded.failure is None


GATHER = """
import sys
import numpy as np
import torch
from mtpbuild.runtime.group.channel import Channel
from mtpbuild.runtime.group.start import GROUP

class Sums(torch.nn.Module):
    def forward(self, x):
        for _ in range(4):
            summed = torch.ops._c10d_functional.all_reduce(x + 1, "sum", GROUP)
            x = torch.ops._c10d_functional.wait_tensor(summed)
        return x * 2

channel, x = Channel(0, 1), torch.zeros(8)
exported = torch.export.export(Sums(), (x,))
path = torch._inductor.aoti_compile_and_package(exported, package_path=sys.argv[1])
program, own = torch._inductor.aoti_load_package(path), np.zeros(300, np.uint8)
for _ in range(3000):
    assert channel.gather(own).shape == (1, 300)
    assert program(x).tolist() == [8.0] * 8
"""


def test_a_program_right_behind_a_gather(tmp_path: Path) -> None:
    """It does not wait for gloo's thread while that one waits for Python's lock: seen in steps.

    One rank is enough, as its collectives go by gloo's threads too.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", GATHER, str(tmp_path / "sums.pt2")]
    done = subprocess.run(command, env=os.environ | alone, timeout=60)
    assert done.returncode == 0
