"""Ranks that are built one at a time, also on several machines, belong together by their inputs."""

import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder.checkpoint.layers_slice import parse_layers
from mtpbuild.builder.compiler.build import BuiltEngine
from mtpbuild.builder.compiler.dry_run import dry_run
from mtpbuild.builder.compiler.fingerprint import fingerprint, hash_files
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.program.trace import TracedProgram
from mtpbuild.builder.stages import Stages
from mtpbuild.builder.targets import load_target
from mtpbuild.builder.weights.placed import ByteRange
from mtpbuild.runtime.contract.manifest import (
    MANIFEST,
    WEIGHTS,
    check_files,
    list_engine_folders,
    name_rank,
    read_manifest,
)
from mtpbuild.runtime.contract.targets import target_names
from mtpbuild.runtime.errors import BuildError, EngineFileError
from mtpbuild.runtime.group.start import find_own_folders, start_ranks
from tests.support.checkpoints import load_config, random_checkpoint
from tests.support.compiler import needs_compiler
from tests.support.fake_target import quick_target
from tests.support.invoke import invoke
from tests.support.requests import altered, build, build_request

TP = 4
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}


def touch(traced: TracedProgram, weights: Mapping[str, ByteRange], folder: Path) -> str:
    """Stand in for AOTInductor, which writes two files."""
    assert len(weights) > 10
    (folder / f"{traced.name}.constants.safetensors").write_bytes(b"constants")
    (folder / f"{traced.name}.pt2").write_bytes(b"program")
    return f"{traced.name}.pt2"


@pytest.fixture(autouse=True)
def quickly() -> Iterator[None]:
    with quick_target("inductor", lower=touch):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("ranks") / "wide", **SHAPE)


def run(
    checkpoint: Path, out: Path, rank: int | None, stages: Stages | None = None, **flags: Any
) -> BuiltEngine:
    request = build_request(checkpoint, (1,), target="inductor", tp=TP, rank=rank, out=out)
    (engine,) = build(altered(request, **flags), stages)
    return engine


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.*")}


def assert_whole(folder: Path, *ranks: int) -> None:
    """Check that these ranks are there, all as it was built, and nothing else is."""
    manifest = read_manifest(folder)
    found = list(list_engine_folders(folder, manifest))
    assert [own.rank for _, own in found] == [None, *ranks]
    for part, own in found:
        check_files(part, own, verify_hashes=True)
    assert list(folder.parent.iterdir()) == [folder]


@needs_compiler
def test_on_several_machines(checkpoint: Path, tmp_path: Path) -> None:
    """Each with a copy of the checkpoint: their folders, copied together, are the whole engine."""
    whole = run(checkpoint, tmp_path / "here" / "engine", None)
    together = tmp_path / "there" / "engine"
    for rank in (2, 0, 3, 1):
        machine = tmp_path / f"machine{rank}"
        copy = shutil.copytree(checkpoint, machine / "data" / "wide", copy_function=shutil.copyfile)
        built = run(copy, machine / "out" / "engine", rank)
        assert_whole(built.folder, rank)
        shutil.copytree(built.folder, together, dirs_exist_ok=True)
    assert_whole(together, *range(TP))
    assert contents(together) == contents(whole.folder)


@needs_compiler
def test_one_after_another(checkpoint: Path, tmp_path: Path) -> None:
    """Later ranks take the programs of the first; what is there already is left alone."""
    out, stages = tmp_path / "out" / "engine", Stages()
    first = run(checkpoint, out, 2, stages)
    assert "lower decode" in stages.seconds
    assert not first.unchanged
    stages = Stages()
    run(checkpoint, out, 0, stages)
    assert "trace prefill" not in stages.seconds
    assert_whole(out, 0, 2)
    assert (out / "rank0" / "decode.pt2").samefile(out / "rank2" / "decode.pt2")
    before = {path: path.stat().st_mtime_ns for path in [out, *out.rglob("*")]}
    assert run(checkpoint, out, 0).unchanged
    assert {path: path.stat().st_mtime_ns for path in [out, *out.rglob("*")]} == before
    request = build_request(checkpoint, (1,), target="inductor", tp=TP, out=out)
    assert not dry_run(replace(request, rank=0), Stages()).engines[0].new
    assert dry_run(request, Stages()).engines[0].new
    assert not run(checkpoint, out, None).unchanged  # the other two
    assert_whole(out, *range(TP))
    old = {path: time for path, time in before.items() if path.parent.name in ("rank0", "rank2")}
    assert old
    assert {path: path.stat().st_mtime_ns for path in old} == old
    assert contents(out) == contents(run(checkpoint, tmp_path / "b" / "engine", None).folder)


@needs_compiler
def test_at_the_same_time(checkpoint: Path, tmp_path: Path) -> None:
    """Rank 3 finds no engine; when it is done, rank 1 has made one."""
    out = tmp_path / "out" / "engine"

    def watch(stage: str) -> None:
        if stage == "package":
            run(checkpoint, out, 1)

    run(checkpoint, out, 3, Stages(watch))
    assert_whole(out, 1, 3)


@needs_compiler
def test_an_interrupted_rank(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out" / "engine"

    def watch(stage: str) -> None:
        if stage == "lower decode":
            raise KeyboardInterrupt

    every = ", ".join(f"weights rank{rank}" for rank in range(TP))
    for rank, finished in ((1, "weights rank1, prefill"), (None, f"{every}, prefill")):
        with pytest.raises(KeyboardInterrupt):
            run(checkpoint, out, rank, Stages(watch))
        assert not out.exists()
        caplog.clear()
        run(checkpoint, out, rank)
        assert [r.getMessage() for r in caplog.records] == [f"resuming {out}: {finished} done"]
        assert_whole(out, *(range(TP) if rank is None else [rank]))
        shutil.rmtree(out)


@needs_compiler
def test_a_damaged_rank_is_built_again(checkpoint: Path, tmp_path: Path) -> None:
    out = run(checkpoint, tmp_path / "out" / "engine", None).folder
    sound = contents(out)
    (out / "rank1" / WEIGHTS).write_bytes(b"half")
    shutil.copyfile(out / "rank3" / MANIFEST, out / "rank2" / MANIFEST)
    (out / "config.json").write_text("{}")
    for rank in (1, 2):
        assert not run(checkpoint, out, rank).unchanged
    assert contents(out) == sound
    assert run(checkpoint, out, None).unchanged


@needs_compiler
def test_what_is_not_there(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line names it, and the command that builds it; that command does."""
    monkeypatch.chdir(checkpoint.parent)
    out = tmp_path / "out" / "engine"
    flags: dict[str, Any] = {"max_batch": 2, "ep": 2, "attention_dp": True}
    flags["layers"] = parse_layers("1-1")
    run(checkpoint, out, 3, **flags)
    code, text, err = invoke("inspect", out)
    assert (code, err) == (0, "")
    assert re.search(r"capacity +8 slots of", text)
    assert re.search(r"ranks +4, experts in 2 groups, attention data-parallel; here: 3 *\n", text)
    for which in ("ranks 0, 1, 2 are", "rank 2 is"):
        code, text, err = invoke("run", "--engine", out, "--prompt-ids", "5")
        assert (code, text) == (1, "")
        assert err.startswith(f"error: {out}: {which} missing (of 4): copy what was built else")
        assert err.count("\n") == 1
        found = re.search("`mtpbuild (.*)`", err)
        assert found is not None
        code, text, err = invoke(*shlex.split(found[1]))
        assert (code, err) == (0, "")
        assert_whole(out, *range(TP))
        assert "of 4 ranks" not in text
        shutil.rmtree(out / name_rank(2))
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(EngineFileError, match=r"engine: rank 2 is missing \(of 4\)"):
        list(find_own_folders(out, read_manifest(out)))


@needs_compiler
def test_ranks_of_another_build(checkpoint: Path, tmp_path: Path) -> None:
    """They are neither replaced by a single rank, nor taken for its own."""
    out = run(checkpoint, tmp_path / "out" / "engine", 0).folder
    before = contents(out)
    with pytest.raises(BuildError, match=r"holds ranks of another build .* use --force"):
        run(checkpoint, out, 1, max_batch=2)
    assert contents(out) == before
    other = run(checkpoint, tmp_path / "other" / "engine", 1, max_batch=2).folder
    shutil.copytree(other / "rank1", out / "rank1")
    code, _, err = invoke("inspect", out)
    assert (code, err) == (1, f"error: {out}/rank1: rank 1 of another build; rebuild the engine\n")
    assert not run(checkpoint, out, 1).unchanged
    assert_whole(out, 0, 1)
    run(checkpoint, out, 1, max_batch=2, force=True)
    assert_whole(out, 1)
    with pytest.raises(EngineFileError, match="ranks 0, 2, 3 are missing"):
        start_ranks(out, read_manifest(out)).__enter__()


def test_slices_are_different_builds(checkpoint: Path, tmp_path: Path) -> None:
    """They are different builds even where their shapes are the same."""
    config = parse_layers("0-0").of(load_config(checkpoint))
    plan = Plan(config, 1, "mtp-eagle", 1, 64, 16)
    target, slices = load_target("onnxruntime"), map(parse_layers, ("0-0", "1-1"))
    prints = {fingerprint(hash_files(checkpoint), plan, target, layers) for layers in slices}
    assert len(prints) == 2


@pytest.mark.parametrize("name", target_names())
def test_versions_of_the_targets_own_packages_count(
    name: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of target onnxruntime stays as it is when TensorRT is upgraded."""
    plan, target = Plan(load_config(checkpoint), 1, "mtp-eagle", 1, 64, 16), load_target(name)
    before = fingerprint(hash_files(checkpoint), plan, target)
    every = {package for other in target_names() for package in load_target(other).packages}

    def upgrade(upgraded: str, package: str) -> str:
        return "99" if package == upgraded else version(package)

    for upgraded in every:
        with monkeypatch.context() as patch:
            patch.setattr(f"{fingerprint.__module__}.version", partial(upgrade, upgraded))
            changes = fingerprint(hash_files(checkpoint), plan, target) != before
        assert changes == (upgraded in target.packages), upgraded


@needs_compiler
def test_the_report(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine"
    flags = ("--model", checkpoint, "--target", "inductor", "--tp", "4", "--out", out)
    code, text, err = invoke("build", *flags, "--rank", "2")
    assert (code, err) == (0, "")
    assert f"{out}: of 4 ranks here: 2\n" in text
