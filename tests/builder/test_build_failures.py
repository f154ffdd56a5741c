"""Builds that die: nothing that looks like an engine stays, and what stood there still stands.

What they had finished stays hidden, for the next build of the same inputs.
"""

import contextlib
import fcntl
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder.compiler.build import BuiltEngine
from mtpbuild.builder.engine import layout
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.program import engine_weights
from mtpbuild.builder.stages import Stages
from mtpbuild.builder.targets import load_flags
from mtpbuild.runtime.contract.manifest import check_files, read_manifest
from mtpbuild.runtime.errors import BuildError, CheckpointError
from tests.support.checkpoints import random_checkpoint, write_tokenizer
from tests.support.planted import wrap
from tests.support.requests import build
from tests.support.stand_ins import failing

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
from tests.support.requests import build
from mtpbuild.builder.plan.request import BuildRequest
from tests.support.fake_target import in_place_of

def trace(*args):
    print("in the middle", flush=True)
    time.sleep(60)

with in_place_of("onnxruntime", trace=trace):
    build(BuildRequest(sys.argv[1], (0,), max_batch=2, out=Path(sys.argv[2])))
"""


def run(checkpoint: Path, out: Path, stages: Stages | None = None, **flags: Any) -> BuiltEngine:
    (engine,) = build(BuildRequest(str(checkpoint), (0,), out=out, **flags), stages)
    return engine


def assert_whole(engine: BuiltEngine) -> None:
    assert read_manifest(engine.folder) == engine.manifest
    check_files(engine.folder, engine.manifest, verify_hashes=True)


def assert_alone_and_whole(engine: BuiltEngine) -> None:
    assert list(engine.folder.parent.iterdir()) == [engine.folder]
    assert_whole(engine)


def stop(
    stage: str,
    checkpoint: Path,
    out: Path,
    error: type[BaseException] = KeyboardInterrupt,
    **flags: Any,
) -> Path:
    """Run a build that ends in `stage`; return the folder that it leaves."""

    def watch(name: str) -> None:
        if name == stage:
            raise error

    with pytest.raises(error):
        run(checkpoint, out, Stages(watch), **flags)
    return out.parent / f".{out.name}.building"


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        *((stage, RuntimeError) for stage in STAGES),
        ("lower decode", KeyboardInterrupt),
        *(
            pytest.param(stage, KeyboardInterrupt, marks=pytest.mark.full)
            for stage in STAGES
            if stage != "lower decode"
        ),
    ],
)
def test_stopped_in_a_stage(
    stage: str,
    error: type[BaseException],
    smallest: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The same build goes on from what was finished, and from nothing else."""
    new, place = tmp_path / "none" / "engine", STAGES.index(stage)
    left = stop(stage, smallest, new, error) / "engine"
    assert not new.exists()
    finished = (["weights"] if place > 1 else []) + [
        program for program in ("prefill", "decode") if place > STAGES.index(f"lower {program}")
    ]
    if stage == "package":
        finished.append("decode_mixed")
    files = [path for path in left.rglob("*") if path.is_file()]
    assert len(files) == len(finished)
    inodes = {path.name: path.stat().st_ino for path in files}
    caplog.clear()
    stages = Stages()
    engine = run(smallest, new, stages)
    assert_alone_and_whole(engine)
    assert {name: (new / name).stat().st_ino for name in inodes} == inodes
    traced = [name.removeprefix("trace ") for name in stages.seconds if name.startswith("trace ")]
    assert traced == [p for p in ("prefill", "decode", "decode_mixed") if p not in finished]
    wanted = [f"resuming {new}: {', '.join(finished)} done"] if finished else []
    assert [record.getMessage() for record in caplog.records] == wanted

    old = run(smallest, tmp_path / "old" / "engine")
    stop(stage, smallest, old.folder, error, max_batch=2)
    assert_whole(old)


def test_parts_of_other_inputs_are_never_used(
    smallest: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "engine"
    for flags in ({"max_batch": 3}, {"force": True}):
        stop("package", smallest, out, max_batch=2)
        stages = Stages()
        caplog.clear()
        assert_alone_and_whole(run(smallest, out, stages, **{"max_batch": 2} | flags))
        assert {"trace prefill", "trace decode", "trace decode_mixed"} <= set(stages.seconds)
        assert not caplog.records
        shutil.rmtree(out)


def test_parts_that_are_not_as_they_were(
    smallest: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Cut short by a power cut, say; and the journal's last line with them."""
    out = tmp_path / "engine"
    left = stop("package", smallest, out)
    (left / "engine" / "weights.safetensors").write_bytes(b"half")
    journal = (left / "parts.jsonl").read_text()
    (left / "parts.jsonl").write_text(journal[:-9])
    caplog.clear()
    assert_alone_and_whole(run(smallest, out))
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"resuming {out}: prefill, decode done"]
    for garbage in (b"", b"\xff\xfe\n{", journal.partition("\n")[0].encode() + b"\n[1]\n"):
        shutil.rmtree(out)
        left = stop("package", smallest, out)
        (left / "parts.jsonl").write_bytes(garbage)
        caplog.clear()
        assert_alone_and_whole(run(smallest, out))
        assert not caplog.records


NO_SPACE = OSError(28, "No space left on device")


def half(place: Callable[..., Path]) -> Callable[..., None]:
    """Write half a file, whose path is found among the arguments."""

    def wrong(real: Callable[..., Any], *given: Any, **options: Any) -> None:
        place(*given).write_bytes(b"half")
        raise NO_SPACE

    return wrong


def no_rename(rename: Callable[[Path, Path], Path], path: Path, target: Path) -> Path:
    """Put the old engine back when the new one's rename fails."""
    if path.parent.name.endswith(".building"):
        raise NO_SPACE
    return rename(path, target)


DISK_FULL: dict[str, tuple[Callable[[], object], str, Callable[..., Any]]] = {
    "weights": (lambda: engine_weights, "write_weights", half(lambda path, *rest: path)),
    "graph": (
        lambda: load_flags("onnxruntime"),
        "lower",
        half(lambda target, traced, weights, folder: folder / "decode.onnx"),
    ),
    "manifest": (lambda: Path, "write_text", half(lambda path, text: path)),
    "tokenizer": (lambda: shutil, "copyfile", half(lambda source, target: target)),
    "rename": (lambda: Path, "rename", no_rename),
}


@pytest.mark.parametrize("what", DISK_FULL)
def test_disk_full(what: str, smallest: Path, tmp_path: Path) -> None:
    owner, name, wrong = DISK_FULL[what]
    model = shutil.copytree(smallest, tmp_path / "model")
    write_tokenizer(model / "tokenizer.json")
    old = run(model, tmp_path / "engines" / "engine")
    other = random_checkpoint(tmp_path / "other", seed=1, num_hidden_layers=1)
    write_tokenizer(other / "tokenizer.json")
    with pytest.MonkeyPatch.context() as patch:
        wrap(patch, owner(), name, wrong)
        with pytest.raises(BuildError) as caught:
            run(model, tmp_path / "new" / "engine")
        assert not (tmp_path / "new" / "engine").exists()
        assert what != "weights" or not list((tmp_path / "new").iterdir())
        assert str(caught.value) == (
            f"{tmp_path / 'new' / 'engine'}: can't write the engine (No space left on device)"
        )
        with pytest.raises(BuildError, match="No space left on device"):
            run(other, old.folder, force=True)  # other weights: nothing to share
    assert_whole(old)
    assert_alone_and_whole(run(model, tmp_path / "new" / "engine"))
    assert_alone_and_whole(run(other, old.folder, force=True))


def test_weights_that_turn_out_bad_while_written(smallest: Path, tmp_path: Path) -> None:
    model = shutil.copytree(smallest, tmp_path / "model")
    file = model / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[:-2] + b"\xc0\x7f")  # the last number becomes a NaN
    with pytest.raises(CheckpointError, match="holds NaN or Inf"):
        run(model, tmp_path / "engines" / "engine")
    assert not list((tmp_path / "engines").iterdir())


@contextlib.contextmanager
def blocked(checkpoint: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process in the middle of a build with --max-batch 2."""
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED, str(checkpoint), str(out)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in the middle\n"
        yield process
        process.send_signal(signal.SIGKILL)


def test_killed(smallest: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While it runs no other one builds the same; after SIGKILL the next one goes on."""
    old = run(smallest, tmp_path / "engine")
    left = tmp_path / ".engine.building"
    with blocked(smallest, old.folder):
        for force in (False, True):
            with pytest.raises(BuildError, match=r"engine: another build of it is at work$"):
                run(smallest, old.folder, max_batch=2, force=force)
        assert run(smallest, old.folder).unchanged
    assert sorted(tmp_path.iterdir()) == [left, old.folder]
    assert sorted(path.name for path in left.rglob("*") if path.is_file()) == [
        "lock",
        "parts.jsonl",
        "weights.safetensors",
    ]
    assert layout.find_engine(left) is layout.find_engine(left / "engine") is None
    assert_whole(old)
    assert not caplog.records
    assert_alone_and_whole(run(smallest, old.folder, max_batch=2))
    (record,) = caplog.records
    assert record.getMessage() == f"resuming {old.folder}: weights done"


def test_killed_between_two_renames(smallest: Path, tmp_path: Path) -> None:
    """The old engine has made room, the new one has not come: it is put back, then replaced."""
    old = run(smallest, tmp_path / "engine")
    old.folder.rename(tmp_path / ".engine.old")
    stop("trace prefill", smallest, old.folder, max_batch=2)
    assert_whole(old)
    shutil.copytree(old.folder, tmp_path / ".engine.old")
    assert_alone_and_whole(run(smallest, old.folder, max_batch=2))


def test_nothing_else_is_removed(smallest: Path, tmp_path: Path) -> None:
    names = {".engine.backup", ".other.building", "engine.building", ".engine.building-7"}
    for name in names:
        (tmp_path / name).mkdir()
    run(smallest, tmp_path / "engine")
    assert {path.name for path in tmp_path.iterdir()} == names | {"engine"}


def test_a_file_system_without_locks(smallest: Path, tmp_path: Path) -> None:
    with failing(fcntl, "flock", OSError(38, "Function not implemented")):
        assert_alone_and_whole(run(smallest, tmp_path / "engine"))
