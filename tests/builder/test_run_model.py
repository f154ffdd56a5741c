"""`mtpbuild run MODEL` of a model that has no engine: what is built, after which question."""

from pathlib import Path

import pytest

from mtpbuild.builder.cli.make import describe_build, make_engine
from mtpbuild.builder.plan.machine import Disk, Machine
from mtpbuild.builder.plan.recipe import load_recipes
from mtpbuild.lab.forecast.cpu import CpuForecast, forecast_cpu
from mtpbuild.lab.forecast.fitting import choose_weights, find_fitting
from mtpbuild.lab.forecast.forecast import ForecastRequest
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.errors import BuildError, MissingWeightsError, UsageError
from tests.support.invoke import refusal

GIGACHAT = "gigachat3-10b-a1.8b-bf16"


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No engines in the current folder, no checkpoints in the cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def foretold(model: str, memory: float) -> CpuForecast:
    disks = Disk(1, 70 * 10**9), Disk(2, 70 * 10**9)
    machine = Machine(int(memory), int(memory), *disks)
    return forecast_cpu(ForecastRequest(model, (), bandwidth=1.0), machine)


def test_weights() -> None:
    """As they are stored, if they are small or integers already; else in int4."""
    assert choose_weights(foretold("deepseek-tiny", 8e9)).weights is None
    assert choose_weights(foretold("deepseek-tiny-int4", 8e9)).weights is None
    found = foretold(GIGACHAT, 64e9)
    assert choose_weights(found).weights == "int4"
    assert describe_build(found, choose_weights(found)) == (
        f"{GIGACHAT} has no engine here. It fetches 22.17 GB, and builds one of 6.53 GB in "
        f"{Path.cwd()}/engines, weights in int4, context 262,144."
    )
    with pytest.raises(BuildError, match=r"not fit this machine, it lacks .* of memory; `mtpb"):
        choose_weights(foretold(GIGACHAT, 6e9))


def test_recipes_that_fit() -> None:
    """Those that `run` would build, the fastest first; a table and JSON say the same."""
    disk = Disk(1, 70 * 10**9)
    found = find_fitting(load_recipes(), Machine(8 * 10**9, 7 * 10**9, disk, disk), 20e9)
    names = [each.forecast.name for each in found]
    assert {"deepseek-tiny", "qwen3.5-0.8b", "qwen3.5-4b", "moonlight-16b-a3b-instruct"} - {
        *names
    } == {"moonlight-16b-a3b-instruct"}
    speeds = [each.tokens_per_s for each in found]
    assert speeds == sorted(speeds, reverse=True)
    (four,) = (each for each in found if each.forecast.name == "qwen3.5-4b")
    assert four.engine.weights == "int4"
    told = four.forecast.speeds(four.engine)
    assert four.tokens_per_s == max(speed for speed in told if speed)


@pytest.mark.usefixtures("quick")
def test_an_engine_is_built_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"Go on\? There is no terminal to ask on: add --yes"):
        make_engine("DeepSeek-Tiny", False)
    output = capsys.readouterr()
    assert "It fetches nothing, and builds one of 40.72 MB" in output.err
    assert not Path("engines").exists()
    assert make_engine("deepseek:tiny", True) == Path("engines/tiny_n3")
    assert read_manifest(Path("engines/tiny_n3")).build.weights == "float32"
    output = capsys.readouterr()
    assert output.out == ""  # which is for the answer
    assert make_engine("deepseek-tiny", False) == Path("engines/tiny_n3")
    assert capsys.readouterr().err == "deepseek-tiny: engines/tiny_n3\n"


def test_what_can_not_be_built_is_said_in_a_line() -> None:
    with pytest.raises(UsageError, match="`mtpbuild build --model deepseek-r1-fp4` makes one"):
        make_engine("deepseek-r1-fp4", True)
    with pytest.raises(
        MissingWeightsError, match="HF_HUB_OFFLINE is set, and OWNER/NAME is neither"
    ):
        make_engine("OWNER/NAME", True)
    assert "is neither a recipe nor a checkpoint folder" in refusal("run", "nothing")
