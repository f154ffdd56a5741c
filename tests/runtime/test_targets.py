"""The registry of targets: those of this package, registered ones, and entry points of others."""

import json
from pathlib import Path

import pytest

from mtpbuild.runtime import Engine
from mtpbuild.runtime.contract.manifest import MANIFEST, read_manifest
from mtpbuild.runtime.contract.targets import TargetRecord, find_target, register, target_names
from mtpbuild.runtime.errors import (
    EngineError,
    EngineFormatError,
    MissingDependencyError,
    UsageError,
)
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.programs.aot_package import TORCH, name_this_machine
from tests.support.engines import write_engine
from tests.support.fakes import FakePrograms, fake_manifest

TARGETS = ("onnxruntime", "inductor", "tensorrt", "tensorrt-rtx")
CODE = """
from mtpbuild.runtime.contract.targets import TargetRecord
from tests.support.fakes import FakePrograms
FOUND = TargetRecord("by-entry-point", "other_target", "other_target")
def load(folder, manifest, threads):
    return FakePrograms(manifest)
"""


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with a target of its own."""
    (tmp_path / "other_target.py").write_text(CODE)
    info = tmp_path / "other_target-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-target\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[mtpbuild.targets]\nby-entry-point = other_target:FOUND\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def engine_for(target: str, folder: Path) -> Path:
    """Return an engine whose manifest names the target, known or not."""
    write_engine(folder, fake_manifest())
    raw = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    raw["target"]["name"] = target
    (folder / MANIFEST).write_text(json.dumps(raw), encoding="utf-8")
    return folder


def test_those_of_this_package() -> None:
    assert target_names()[:4] == TARGETS
    for name in TARGETS:
        target = find_target(name)
        assert target.name == name
        assert target.programs.startswith("mtpbuild.runtime.programs.")
        assert str(target.builder).startswith("mtpbuild.builder.targets.")


def test_an_unknown_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"^unknown target 'abacus'; supported: {TARGETS[0]}, "):
        find_target("abacus")
    folder = engine_for("abacus", tmp_path / "engine")
    says = r"engine.json: target.name: unknown target 'abacus'; supported: onnxruntime, .*; rebuild"
    with pytest.raises(EngineFormatError, match=says) as caught:
        Engine.load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("other")
def test_one_of_another_package(tmp_path: Path) -> None:
    folder = engine_for("by-entry-point", tmp_path / "engine")
    assert target_names()[-1] == "by-entry-point"
    programs = load_programs(folder, read_manifest(folder))
    assert isinstance(programs, FakePrograms)


def test_an_option_that_a_target_lacks(tmp_path: Path) -> None:
    folder = engine_for("inductor", tmp_path / "engine")
    with pytest.raises(UsageError) as caught:
        Engine.load(folder, provider="cuda")
    assert str(caught.value) == ("provider cuda is for target onnxruntime, not inductor")


def test_graphs_that_are_not_there(tmp_path: Path) -> None:
    folder = engine_for("onnxruntime", tmp_path / "engine")
    with pytest.raises(UsageError) as caught:
        Engine.load(folder, no_cuda_graphs=True)
    assert str(caught.value) == ("no_cuda_graphs is for target inductor, not onnxruntime")
    folder = engine_for("inductor", tmp_path / "cpu")
    manifest = read_manifest(folder)
    here = {"versions": {"torch": TORCH}, "hardware": name_this_machine()}
    target = manifest.target.model_copy(update=here)
    says = "cpu: built for a CPU, which has no CUDA graphs to switch off$"
    with pytest.raises(EngineError, match=says):
        load_programs(folder, manifest.model_copy(update={"target": target}), no_cuda_graphs=True)


def test_a_package_that_is_not_installed(tmp_path: Path) -> None:
    """The error says what to install if the target does; else it is Python's own."""
    (folder := tmp_path / "engine").parent.mkdir(exist_ok=True)
    write_engine(folder, fake_manifest())
    manifest = read_manifest(folder)
    real = find_target("onnxruntime")
    try:
        register(TargetRecord(real.name, "no_such_module", real.builder, "pip install it"))
        with pytest.raises(MissingDependencyError, match=r"^this engine needs no_such_module: pip"):
            load_programs(folder, manifest)
        register(TargetRecord(real.name, "no_such_module", real.builder))
        with pytest.raises(ModuleNotFoundError):
            load_programs(folder, manifest)
    finally:
        register(real)
