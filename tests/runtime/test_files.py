"""What is no regular file is never opened: an engine or a checkpoint may come from anywhere."""

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import MANIFEST, MAX_MANIFEST, read_manifest
from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.sampling.defaults import read_generation_defaults
from tests.support.checkpoints import SMALLEST, random_checkpoint
from tests.support.engines import write_manifest
from tests.support.invoke import invoke


def link_to(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def link(path: Path) -> None:
        other = path.parent.parent / "elsewhere"
        make(other)
        path.symlink_to(other)

    return link


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's path is at most a hundred characters long
        bound.bind(path.name)
        os.chdir(before)


KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a FIFO": (os.mkfifo, "a FIFO, not a regular file"),
    "a link to a FIFO": (link_to(os.mkfifo), "a FIFO, not a regular file"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "a device, not a regular"),
    "a socket": (bind, "a socket, not a regular file"),
    "a directory": (Path.mkdir, "directory|is missing"),
    "a link to a directory": (link_to(Path.mkdir), "directory|is missing"),
    "a link to nothing": (lambda path: path.symlink_to("nowhere"), "No such file"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "Too many levels|is missing"),
}


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    """End a test that waits for a FIFO."""

    def hang(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("fake_target")
@pytest.mark.parametrize("name", [MANIFEST, "tokenizer.json", "decode.onnx", "weights.safetensors"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine(kind: str, name: str, engine_dir: Path) -> None:
    make, says = KINDS[kind]
    (engine_dir / name).unlink()
    make(engine_dir / name)
    says = f"{says}|not an engine" if name == MANIFEST else says
    with pytest.raises(EngineError, match=says) as caught:
        Engine.load(engine_dir)
    assert "\n" not in str(caught.value)
    code, _, err = invoke("inspect", engine_dir)
    assert (code, err.count("\n")) == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_defaults_are_read_before_the_engine_is_checked(kind: str, tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    KINDS[kind][0](tmp_path / "engine" / "generation_config.json")
    assert read_generation_defaults(tmp_path / "engine") == {}


@pytest.mark.usefixtures("fake_target")
def test_an_engine_of_links(engine_dir: Path, tmp_path: Path) -> None:
    """As a hub's cache has them: relative ones, whose files have other names."""
    blobs, linked = tmp_path / "blobs", tmp_path / "snapshot"
    shutil.copytree(engine_dir, blobs)
    linked.mkdir()
    for number, path in enumerate(sorted(blobs.iterdir())):
        blob = path.rename(blobs / f"{number}")
        (linked / path.name).symlink_to(Path("..", "blobs", blob.name))
    with Engine.load(linked, verify_hashes=True) as engine:
        assert engine.generate([5], SamplingParams(max_tokens=2)).token_ids


@pytest.mark.parametrize(
    ("content", "says"),
    [(b" " * (MAX_MANIFEST + 1), "bytes, of which"), (b"[" * 100_000, "nested too deeply"),
     (b'{"format_version": ' + b"9" * 5000 + b"}", "not readable as JSON")],
    ids=["large", "deep", "a long number"],
)  # fmt: skip
def test_a_manifest_that_takes_too_much(content: bytes, says: str, engine_dir: Path) -> None:
    (engine_dir / MANIFEST).write_bytes(content)
    with pytest.raises(EngineError, match=says):
        Engine.load(engine_dir)


def test_deep_configurations(engine_dir: Path) -> None:
    manifest = read_manifest(engine_dir)
    (engine_dir / "tokenizer_config.json").write_bytes(b"[" * 100_000)
    write_manifest(engine_dir, manifest)
    with pytest.raises(EngineError, match="nested too deeply"):
        Engine.load(engine_dir)
    (engine_dir / "generation_config.json").write_bytes(b"[" * 100_000)
    assert read_generation_defaults(engine_dir) == {}


CHECKPOINT = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors")


@pytest.mark.parametrize("name", [*CHECKPOINT, "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["a FIFO", "a link to a device", "a directory"])
def test_a_checkpoint(kind: str, name: str, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "model", **SMALLEST)
    (folder / name).unlink(missing_ok=True)
    KINDS[kind][0](folder / name)
    code, _, err = invoke("build", "--model", folder, "--nextn", "0", "--dry-run")
    assert (code, err.count("\n")) == (1, 1)


@pytest.mark.parametrize("size", [0, 1 << 30, (1 << 63) - 1])
def test_a_safetensors_header_that_lies(size: int, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "model", **SMALLEST)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(size.to_bytes(8, "little"))
    code, _, err = invoke("build", "--model", folder, "--nextn", "0", "--dry-run")
    assert (code, err.count("\n")) == (1, 1)
