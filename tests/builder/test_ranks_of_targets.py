"""What ranks of all targets have in common: where they do not run, and how they end."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.errors import EngineFileError
from mtpbuild.runtime.group.start import require_ranks
from tests.support import eager_ranks, trt_ranks
from tests.support.checkpoints import make_predictable, save_checkpoint
from tests.support.fake_target import quick_target
from tests.support.invoke import invoke
from tests.support.rank_engines import SHAPE, check_death, make

pytestmark = [
    pytest.mark.xdist_group("inductor"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch's own, in export and gloo
]
Machine = Callable[[], contextlib.AbstractContextManager[object]]
# The machine, flags of a build, and those that the command for a missing rank repeats.
ENGINES: dict[str, tuple[Machine, dict[str, Any], str]] = {
    "inductor": (eager_ranks.in_place_of_the_compiler, {}, "--tp 2 --ep 1"),
    "attention-dp": (
        eager_ranks.in_place_of_the_compiler,
        {"attention_dp": True},
        "--attention-dp",
    ),
    "gpus": (
        eager_ranks.on_gpus,
        {"device": "cuda", "ep": 2, "max_batch": 2},
        "--ep 2 --device cuda --dtype float32",
    ),
    "tensorrt": (
        trt_ranks.used,
        {"target": "tensorrt", "dtype": "float32", "max_seq_len": 100},
        "--target tensorrt --tp 2 --ep 1 --dtype float32",
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "shared"
    return save_checkpoint(folder, make_predictable(**SHAPE), **SHAPE)


@pytest.fixture(scope="module", params=ENGINES)
def engine(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    machine, flags, _ = ENGINES[request.param]
    with machine():
        yield make(checkpoint, tmp_path_factory.mktemp("engines") / "engine", tp=2, **flags)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs(
    engine: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with attention-DP that has nothing to do is missed, too."""
    check_death(engine, number, 4, monkeypatch)


def check_too_few_gpus(engine: Path) -> None:
    code, _, err = invoke("run", "--engine", engine, "--prompt-ids", "5")
    says = "2 ranks need a GPU each, this machine has 1: spread them over machines with"
    assert (code, err) == (2, f"error: {engine}: {says} torchrun\n")


@pytest.mark.parametrize("name", ENGINES)
def test_where_it_does_not_run(
    name: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, flags, repeated = ENGINES[name]
    with machine(), quick_target(flags.get("target", "inductor")):
        engine = make(checkpoint, tmp_path / "engine", tp=2, **flags)
        if read_manifest(engine).target.compute_capabilities:
            monkeypatch.setenv(eager_ranks.GPUS, "1")
            check_too_few_gpus(engine)
    (engine / "rank1").rename(tmp_path / "elsewhere")
    with pytest.raises(EngineFileError, match=" --rank 1 --out ") as caught:
        require_ranks(engine, read_manifest(engine), [1])
    assert repeated in str(caught.value)
