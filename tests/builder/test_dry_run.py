"""`mtpbuild build --dry-run`: refuses what a build refuses, foretells its sizes, writes nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from mtpbuild.builder.dry_run import dry_run
from mtpbuild.builder.pipeline import BuildRequest, Stages, build
from mtpbuild.builder.weights_file import WEIGHTS
from tests.builder.test_cli import invoke
from tests.checkpoints import random_checkpoint

TOOL = Path(__file__).parents[2] / "tools" / "sparse_checkpoint.py"


@pytest.mark.usefixtures("quick")
def test_what_it_foretells(smallest: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine"
    request = BuildRequest(str(smallest), nextn=(1,), out=out)
    done = dry_run(request, Stages())
    assert not out.exists()
    (foreseen,) = done.engines
    (built,) = build(request)
    header = int.from_bytes((out / WEIGHTS).read_bytes()[:8], "little")
    assert foreseen.weights == built.manifest.files[WEIGHTS].size - 8 - header
    assert foreseen.folder == out
    assert (foreseen.plan.drafter, foreseen.unchanged) == (built.manifest.build.drafter, False)
    assert done.parameters == built.manifest.model.parameters
    (again,) = dry_run(request, Stages()).engines
    assert again.unchanged


def test_the_command(smallest: Path, tmp_path: Path) -> None:
    flags = ("build", "--model", smallest, "--nextn", "0,1", "--out", tmp_path, "--dry-run")
    code, out, err = invoke(*flags)
    assert (code, err) == (0, "")
    assert "57 tensors in 1 files, as config.json demands" in out
    assert "dry run: nothing was written" in out
    assert not any(tmp_path.iterdir())


def test_refusals(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "model", num_hidden_layers=1)
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[:-7])
    code, out, err = invoke("build", "--model", folder, "--nextn", "0", "--dry-run")
    assert (code, out) == (1, "")
    assert "model.safetensors is 7 bytes short" in err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    flags = ("--nextn", "0", "--out", tmp_path / "full", "--dry-run")
    assert "is not an engine" in invoke("build", "--model", folder, *flags)[2]


def test_a_checkpoint_of_holes(tmp_path: Path) -> None:
    """True headers without bytes behind them pass all checks."""
    out = tmp_path / "sparse"
    command = [sys.executable, str(TOOL), "deepseek-tiny-nvfp4", "--out", str(out)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    size = (out / "model.safetensors").stat().st_size
    assert told.startswith("wrote 1 files of ")
    done = dry_run(
        BuildRequest("deepseek-tiny-nvfp4", nextn=(3,), checkpoint=out, out=tmp_path / "e"),
        Stages(),
    )
    assert done.dequantised == {"nvfp4": 108}
    assert 0 < size < 14e6
    assert done.engines[0].weights == 4 * done.parameters
