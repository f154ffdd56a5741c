"""`mtpbuild build --dry-run`: refuses what a build refuses, foretells its sizes, writes nothing."""

import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mtpbuild.builder.checkpoint.shards import SINGLE
from mtpbuild.builder.cli import app
from mtpbuild.builder.compiler import build as build_module
from mtpbuild.builder.compiler import plans
from mtpbuild.builder.compiler.dry_run import dry_run
from mtpbuild.builder.compiler.quantize import QuantizeRequest
from mtpbuild.builder.compiler.weightless import check_slices
from mtpbuild.builder.plan import machine
from mtpbuild.builder.plan.machine import Disk
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages, ignore
from mtpbuild.builder.weights.scheme import make_scheme
from mtpbuild.runtime.contract.manifest import WEIGHTS
from mtpbuild.runtime.errors import BuildError, CheckpointError, advise_install
from mtpbuild.runtime.ranks import Ranks
from mtpbuild.runtime.safetensors_header import read_header
from tests.support.checkpoints import SMALLEST, random_checkpoint
from tests.support.fake_target import quick_target
from tests.support.invoke import invoke, refusal
from tests.support.opened import opened
from tests.support.requests import build, build_request, quantize
from tests.support.run_command import ScreenRunner
from tests.support.stand_ins import failing

TOOL = Path(__file__).parents[2] / "tools" / "sparse_checkpoint.py"


@pytest.mark.usefixtures("quick")
def test_what_it_foretells(smallest: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine"
    request = build_request(smallest, nextn=(1,), out=out)
    told = list[str]()
    done = dry_run(request, Stages(told.append))
    weights = [line for line in told if line.startswith("check checkpoint: rank 0, weight ")]
    assert weights[-1].endswith(f"weight {len(weights)} of {len(weights)}")
    assert not out.exists()
    (foreseen,) = done.engines
    (built,) = build(request)
    _, _, start = read_header(out / WEIGHTS)
    assert foreseen.weight_file_bytes == built.manifest.files[WEIGHTS].size - start
    assert foreseen.folder == out
    assert (foreseen.plan.drafter, foreseen.new) == (built.manifest.build.drafter, True)
    assert done.model.table.parameters == built.manifest.model.parameters
    (again,) = dry_run(request, Stages()).engines
    assert again == replace(foreseen, new=False), "a build compares it by its fingerprint"
    assert foreseen.graphs
    assert dry_run(replace(request, force=True), Stages()).engines == done.engines


@pytest.mark.usefixtures("quick")
def test_what_needs_no_hash(
    smallest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run, and refusals: by the machine and by the checkpoint. An engine is compared."""

    def refuse_to_hash(folder: Path, watch: object) -> dict[str, str]:
        raise AssertionError(f"{folder} is hashed")

    request = build_request(smallest, nextn=(1,), out=tmp_path / "engine")
    build(request)
    monkeypatch.setattr(plans, "hash_files", refuse_to_hash)
    dry_run(request, Stages())
    for refused in (request, build_request(smallest, nextn=(0,), out=tmp_path / "new")):
        with pytest.raises(AssertionError, match="is hashed"):
            build(refused)
    broken = shutil.copytree(smallest, tmp_path / "broken")
    tensors = load_file(broken / SINGLE)
    del tensors["lm_head.weight"]
    save_file(tensors, broken / SINGLE)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        build(build_request(broken, nextn=(0,), out=tmp_path / "new"))

    def check_machine(plan: Plan) -> None:
        raise BuildError("no compiler")

    refusing = quick_target("onnxruntime", check_machine=check_machine)
    with refusing, pytest.raises(BuildError, match="no compiler"):
        build(build_request(smallest, nextn=(0,), out=tmp_path / "new"))


@pytest.mark.usefixtures("quick")
def test_the_stages(smallest: Path, tmp_path: Path) -> None:
    """Hashes are a stage with a name, its progress and its time; what is there needs no others."""
    told, stages = list[str](), Stages()
    request = build_request(smallest, nextn=(1,), out=tmp_path / "engine")
    build(request, Stages(told.append))
    assert told[:3] == ["load compiler", "check checkpoint", "fingerprint"]
    assert told[3].startswith("fingerprint: file 1 of ")
    build(request, stages)
    assert [*stages.seconds] == ["fingerprint"]


@pytest.mark.usefixtures("quick")
def test_the_command(smallest: Path, tmp_path: Path) -> None:
    flags = ("build", "--model", smallest, "--nextn", "0,1", "--out", tmp_path, "--dry-run")
    code, out, err = invoke(*flags)
    assert (code, err) == (0, "")
    assert "57 tensors in 1 files, as config.json demands" in out
    assert "small_n1: exported without weights: prefill 0 nodes, decode 0 nodes, " in out
    assert "dry run: nothing was written" in out
    assert re.search(r"check checkpoint .* s, export .* s; peak memory \d+ MiB", out)
    assert not any(tmp_path.iterdir())


@pytest.mark.usefixtures("quick")
def test_a_disk_that_is_too_small(
    smallest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found before anything is written; engines of one build share their weights."""
    out, asked = tmp_path / "engines", list[Path]()
    flags = ("build", "--model", smallest, "--nextn", "0,1", "--out", out)
    (needed,) = {
        e.weight_file_bytes for e in dry_run(build_request(smallest, out=out), Stages()).engines
    }

    def free(size: int) -> None:
        def find_disk(place: Path) -> Disk:
            asked.append(place)
            return Disk(1, size)

        monkeypatch.setattr(machine, "find_disk", find_disk)

    free(needed - 1)
    why = f"{needed / 1e3:,.2f} kB are to be written, and the disk of {out.resolve()} has "
    why += f"{(needed - 1) / 1e3:,.2f} kB free: --out names another place"
    assert refusal(*flags, code=1) == f"{smallest.name}: {why}"
    code, told, err = invoke(*flags, "--dry-run")
    assert (code, err) == (0, "")
    assert f"can't be built here: {why}\n" in told
    assert not out.exists()
    quantize = ("quantize", "--model", smallest, "--to", "fp8", "--out", out)
    free(0)
    assert "kB are to be written, and the disk of" in refusal(*quantize, code=1)
    assert not out.exists()
    assert set(asked) == {out}

    free(needed)
    assert invoke(*flags)[0] == 0
    free(0)  # nothing is to be written
    assert invoke(*flags)[0] == 0
    built = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    refit = ("refit", "--engine", out / "small_n1", "--checkpoint", smallest)
    assert "0 bytes free: free some, or build the engine elsewhere" in refusal(*refit, code=1)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == built


@pytest.mark.usefixtures("quick")
def test_parts_of_an_interrupted_build_need_no_room(
    smallest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = build_request(smallest, nextn=(1,), out=tmp_path / "engine")
    broken = OSError(5, "Input/output error")
    with (
        failing(build_module, "copy_side_files", broken),
        pytest.raises(BuildError, match="Input/output error"),
    ):
        build(request)
    monkeypatch.setattr(machine, "find_disk", lambda place: Disk(1, 0))
    (built,) = build(request)
    assert built.folder.is_dir()


@pytest.mark.usefixtures("quick")
def test_names_are_whole_on_a_narrow_terminal(
    smallest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--nextn", "0,1", "--out", "engines/set_of_r1", "--dry-run")
    asked = ["build", "--model", str(smallest), *flags]
    done = ScreenRunner().invoke(app, asked, env={"COLUMNS": "80"})
    assert all(f"engines/set_of_r1/small_n{nextn} " in done.stdout for nextn in (0, 1))
    assert " mtp-vanilla " in done.stdout


def test_a_tied_embedding_is_counted_once(tmp_path: Path) -> None:
    """The engine holds it twice, the checkpoint does not."""
    counts = []
    for tied in (False, True):
        folder = random_checkpoint(tmp_path / f"{tied}", **EVEN | {"tie_word_embeddings": tied})
        model = opened(folder, device="meta")
        held = sum(parameter.numel() for parameter in model.model.parameters())
        counts.append((model.table.parameters, held))
    (plain, held), (tied_count, tied_held) = counts
    assert plain == held == tied_held
    assert tied_count == plain - 64 * 32  # [vocabulary, width]


EVEN = SMALLEST | {"vocab_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}


@pytest.fixture(scope="module")
def fp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp4")
    plain = random_checkpoint(folder / "plain", **EVEN)
    quantize(QuantizeRequest(str(plain), make_scheme("nvfp4", None, None), folder / "fp4"))
    return folder / "fp4"


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("flags", "wide"),
    [
        (("--ep", "2", "--attention-dp"), 2),
        pytest.param((), 2, marks=FULL),
        pytest.param(("--ep", "2"), 2, marks=FULL),
        pytest.param(("--dtype", "float32"), 4, marks=FULL),
        pytest.param(("--attention-dp",), 2, marks=FULL),
    ],
)
def test_a_rank_for_tensorrt(flags: tuple[str, ...], wide: int, fp4: Path, tmp_path: Path) -> None:
    """The graphs are exported on a machine without a GPU and without TensorRT's packages."""
    caches = 2 * 320 * 20 * wide  # of layer and module: 256 rows and a window, aligned
    command = ("build", "--model", fp4, "--target", "tensorrt", "--tp", "2", "--dry-run")
    code, out, err = invoke(*command, *flags, "--out", tmp_path / "engine")
    assert (code, err) == (0, "")
    assert re.search(r"prefill [1-9]\d* nodes, decode [1-9]\d* nodes, decode_mixed [1-9]\d*", out)
    assert "GB nvfp4 per rank" in out
    held = rf"weights [\d.]+ kB, caches {caches / 1e3:.2f} kB, all programs together hold"
    assert re.search(rf"each rank: {held} [\d.]+ kB of weights; intermediate results up to ", out)
    lacks = f"target tensorrt needs tensorrt: {advise_install('tensorrt')}" in out
    assert lacks == (find_spec("tensorrt") is None)
    assert not (tmp_path / "engine").exists()


@pytest.mark.skipif(find_spec("tensorrt") is not None, reason="TensorRT is installed")
def test_the_headline_command_without_a_gpu(fp4: Path, tmp_path: Path) -> None:
    """One line says what is missing and what was checked; nothing is read or written."""
    command = ("build", "--model", "deepseek-r1-fp4", "--nextn", "3", "--tp", "2")
    err = refusal(*command, "--checkpoint", fp4, "--out", tmp_path / "engine", code=1)
    assert err.startswith("target tensorrt can't compile here: ")
    assert f"target tensorrt needs tensorrt: {advise_install('tensorrt')}" in err
    assert "(checked: flags and config.json: nextn 3, bfloat16, 2 ranks; --dry-run checks" in err
    assert not (tmp_path / "engine").exists()
    more = invoke(*command[:-1], "3", "--checkpoint", fp4, "--out", tmp_path / "engine")[2]
    assert more.startswith("error: --tp 3 does not divide"), "what was checked, was"


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "plain", **EVEN)
    model = opened(folder, device="meta", ranks=Ranks(2))
    check_slices(model, [0, 1], ignore)
    model = replace(model, ranks=Ranks(4))
    with pytest.raises(BuildError, match=r"rank 3: embed_tokens is \[16, 32\], the program's \[32"):
        check_slices(model, [3], ignore)


def test_refusals(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "model", num_hidden_layers=1)
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[:-7])
    assert "model.safetensors is 7 bytes short" in refusal(
        *("build", "--model", folder, "--nextn", "0", "--dry-run"), code=1
    )
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    flags = ("--nextn", "0", "--out", tmp_path / "full", "--dry-run")
    assert "is not an engine" in invoke("build", "--model", folder, *flags)[2]


@pytest.mark.usefixtures("quick")
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
    assert not done.model.dequantised()
    assert Counter(done.model.rounded().values()) == {"nvfp4": 108}
    assert 0 < size < 14e6
    held = sum(parameter.nbytes for parameter in done.model.model.parameters())
    assert done.engines[0].weight_file_bytes == held
    floats = 4 * done.model.table.parameters
    assert held < floats
