"""Builds that die: nothing that looks like an engine stays, and what stood there still stands."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder import compiler, package
from mtpbuild.builder.pipeline import BuildRequest, BuiltEngine, Stages, build
from mtpbuild.builder.targets.onnxruntime import OnnxRuntimeTarget
from mtpbuild.runtime.errors import BuildError, CheckpointError
from mtpbuild.runtime.manifest import check_files, read_manifest
from tests.checkpoints import random_checkpoint, write_tokenizer

pytestmark = pytest.mark.usefixtures("quick")

STAGES = (
    "check checkpoint",
    "write weights",
    "trace prefill",
    "lower prefill",
    "trace decode",
    "lower decode",
    "package",
)
BLOCKED = """
import sys, time
from pathlib import Path
from mtpbuild.builder import compiler
from mtpbuild.builder.pipeline import BuildRequest, build

def trace(*args):
    print("in the middle", flush=True)
    time.sleep(60)

compiler.trace = trace
build(BuildRequest(sys.argv[1], (0,), out=Path(sys.argv[2]), force=True))
"""


def run(checkpoint: Path, out: Path, stages: Stages | None = None, **flags: Any) -> BuiltEngine:
    (engine,) = build(BuildRequest(str(checkpoint), (0,), out=out, **flags), stages)
    return engine


def assert_alone_and_whole(engine: BuiltEngine) -> None:
    assert list(engine.folder.parent.iterdir()) == [engine.folder]
    assert read_manifest(engine.folder) == engine.manifest
    check_files(engine.folder, engine.manifest, verify_hashes=True)


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_stopped_in_a_stage(
    stage: str, error: type[BaseException], smallest: Path, tmp_path: Path
) -> None:
    def watch(name: str) -> None:
        if name == stage:
            raise error

    new = tmp_path / "none" / "engine"
    with pytest.raises(error):
        run(smallest, new, Stages(watch))
    assert not new.parent.exists() or not list(new.parent.iterdir())

    old = run(smallest, tmp_path / "old" / "engine")
    with pytest.raises(error):
        run(smallest, old.folder, Stages(watch), max_batch=2)
    assert_alone_and_whole(old)


def no_weights(patch: pytest.MonkeyPatch) -> None:
    def write(path: Path, *args: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    patch.setattr(compiler, "write_weights", write)


def no_graph(patch: pytest.MonkeyPatch) -> None:
    def lower(self: OnnxRuntimeTarget, traced: Any, weights: Any, folder: Path) -> str:
        (folder / "decode.onnx").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    patch.setattr(OnnxRuntimeTarget, "lower", lower)


def no_manifest(patch: pytest.MonkeyPatch) -> None:
    def write_text(self: Path, text: str, **options: Any) -> int:
        self.write_bytes(text[:9].encode())
        raise OSError(28, "No space left on device")

    patch.setattr(Path, "write_text", write_text)


def no_tokenizer(patch: pytest.MonkeyPatch) -> None:
    def copyfile(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    patch.setattr(shutil, "copyfile", copyfile)


def no_rename(patch: pytest.MonkeyPatch) -> None:
    """The old engine has made room when the new one's rename fails."""
    rename = Path.rename

    def wrong(self: Path, target: Path) -> Path:
        if ".building-" in self.name:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    patch.setattr(Path, "rename", wrong)


@pytest.mark.parametrize("full", [no_weights, no_graph, no_manifest, no_tokenizer, no_rename])
def test_disk_full(full: Any, smallest: Path, tmp_path: Path) -> None:
    model = shutil.copytree(smallest, tmp_path / "model")
    write_tokenizer(model / "tokenizer.json")
    old = run(model, tmp_path / "engines" / "engine")
    other = random_checkpoint(tmp_path / "other", seed=1, num_hidden_layers=1)
    write_tokenizer(other / "tokenizer.json")
    with pytest.MonkeyPatch.context() as patch:
        full(patch)
        with pytest.raises(BuildError) as caught:
            run(model, tmp_path / "new" / "engine")
        assert not list((tmp_path / "new").iterdir())
        assert str(caught.value) == (
            f"{tmp_path / 'new' / 'engine'}: can't write the engine (No space left on device)"
        )
        with pytest.raises(BuildError, match="No space left on device"):
            run(other, old.folder, force=True)  # other weights: nothing to share
    assert_alone_and_whole(old)


def test_weights_that_turn_out_bad_while_written(smallest: Path, tmp_path: Path) -> None:
    model = shutil.copytree(smallest, tmp_path / "model")
    file = model / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[:-2] + b"\xc0\x7f")  # the last number becomes a NaN
    with pytest.raises(CheckpointError, match="holds NaN or Inf"):
        run(model, tmp_path / "engines" / "engine")
    assert not list((tmp_path / "engines").iterdir())


def test_killed(smallest: Path, tmp_path: Path) -> None:
    """SIGKILL leaves a hidden folder without a manifest; the next build removes it."""
    old = run(smallest, tmp_path / "engine")
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED, str(smallest), str(old.folder)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in the middle\n"
        process.send_signal(signal.SIGKILL)
    left = tmp_path / f".engine.building-{process.pid}"
    assert sorted(tmp_path.iterdir()) == [left, old.folder]
    assert [path.name for path in left.iterdir()] == ["weights.safetensors"]
    assert package.existing(left) is None
    assert_alone_and_whole(run(smallest, old.folder, force=True))


def test_a_process_id_that_comes_again(smallest: Path, tmp_path: Path) -> None:
    """In a container every build may have the same process id."""
    left = tmp_path / f".engine.building-{os.getpid()}"
    left.mkdir()
    (left / "weights.safetensors").write_bytes(b"half")
    assert_alone_and_whole(run(smallest, tmp_path / "engine"))


def test_only_our_own_leftovers_are_removed(smallest: Path, tmp_path: Path) -> None:
    pid, names = dead_pid(), set[str]()
    for name in (
        f".engine.backup-{pid}",
        f".other.building-{pid}",
        f"engine.building-{pid}",
        f".engine.building-{os.getppid()}",  # still at work
        ".engine.building-x",
    ):
        (tmp_path / name).mkdir()
        names.add(name)
    for kind in ("building", "old"):
        (tmp_path / f".engine.{kind}-{pid}").mkdir()
    run(smallest, tmp_path / "engine")
    assert {path.name for path in tmp_path.iterdir()} == names | {"engine"}
