"""Engines of several ranks behind the server: rank 0 serves, and a rank that dies ends all."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.runtime import Engine
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.errors import RankError
from mtpbuild.runtime.group.start import TIMEOUT
from mtpbuild.runtime.server.options import ServerOptions
from mtpbuild.runtime.server.service import Service
from tests.reference.recompute import greedy
from tests.support import eager_ranks
from tests.support.checkpoints import make_predictable, save_checkpoint
from tests.support.fakes import FakePrograms, fake_manifest, fake_tokenizer
from tests.support.live_server import url_of
from tests.support.rank_engines import PROMPT, SHAPE, make

ROOT = Path(__file__).parents[2]
SERVE = [sys.executable, "-m", "tests.support.eager_command", "serve"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]


class Abandoned(FakePrograms):
    """Programs that another rank runs too, until it is gone."""

    failure: str | None = None

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        self.features |= {Feature.SHARE}

    def close(self) -> None:
        """There is no other process to be told."""


def test_a_rank_is_missed_though_nobody_asks() -> None:
    manifest = fake_manifest()
    two = manifest.build.model_copy(update={"tp": 2})
    manifest = manifest.model_copy(update={"build": two})
    programs, service = Abandoned(manifest), Service(ServerOptions())
    told: list[str] = []
    service.on_failure = lambda: told.append(str(service.failed))

    async def main() -> None:
        watching = asyncio.create_task(service.watch(0.01))
        await asyncio.sleep(0.05)
        assert service.ready
        programs.failure = "rank 0 of 2: another rank is gone"
        await asyncio.wait_for(watching, 5)

    with Engine(programs, manifest, fake_tokenizer()) as engine:
        service.start(engine)
        asyncio.run(main())
    assert not service.ready
    assert isinstance(service.failed, RankError), "so rank 0 looks which rank has ended"
    assert told == ["rank 0 of 2: another rank is gone"]


@pytest.fixture(scope="module")
def model() -> PlainDeepseek:
    return make_predictable(**SHAPE)


@pytest.fixture(scope="module")
def engine(model: PlainDeepseek, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    checkpoint = save_checkpoint(tmp_path_factory.mktemp("ranks") / "shared", model, **SHAPE)
    out = tmp_path_factory.mktemp("engines") / "tp2"
    with eager_ranks.in_place_of_the_compiler():
        yield make(checkpoint, out, tp=2)


def ranks_of(process: int) -> dict[int, int]:
    """Find the processes of the group below a process: their ranks, and their ids."""
    found = dict[int, int]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ranks = [int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")]
        if parent == process and ranks:
            found[ranks[0]] = int(folder.name)
    return found


@pytest.mark.full
@pytest.mark.xdist_group("inductor")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, in export and gloo
@pytest.mark.parametrize(
    ("launcher", "says"),
    [([], r"\Aerror: rank 1 was killed by signal 9\n\Z"), (TORCHRUN, "SIGKILL")],
    ids=["alone", "torchrun"],
)
def test_two_ranks(
    launcher: list[str],
    says: str,
    engine: Path,
    model: PlainDeepseek,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TIMEOUT, "8")
    flags = ["--port", "0", "--threads", "1", "--no-access-log"]
    command = [*launcher, *SERVE, "--engine", str(engine), *flags]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = url_of(process)
            body = {"prompt": PROMPT, "max_tokens": 16, "ignore_eos": True, "temperature": 0}
            for _ in range(2):
                asked = body | {"return_token_ids": True}
                answer = httpx2.post(f"{url}/v1/completions", json=asked, timeout=60).json()
                assert answer["choices"][0]["token_ids"] == greedy(model, PROMPT, 16)
            os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
            began = time.monotonic()
            assert process.wait(60) == 1
            assert time.monotonic() - began < 40
            assert process.stderr is not None
            assert re.search(says, process.stderr.read())
        finally:
            process.kill()


@pytest.mark.full
@pytest.mark.xdist_group("inductor")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_signal_to_torchrun_lets_requests_end(engine: Path) -> None:
    """It tells all ranks; those that follow outlive it, or the answer could not be finished."""
    command = [*TORCHRUN, *SERVE, "--engine", str(engine), "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = url_of(process)
            body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "stream": True}
            with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                assert [line for line in lines if line][-1] == "data: [DONE]"
            process.wait(40)
        finally:
            process.kill()
