"""Turns lowered files into an engine directory: manifest, hashes, and one atomic rename."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from mtpbuild.builder.plan import Plan
from mtpbuild.runtime.errors import BuildError, EngineError, MtpbuildError
from mtpbuild.runtime.manifest import (
    MANIFEST,
    BuildInfo,
    FileSpec,
    Manifest,
    ModelInfo,
    ProgramSpec,
    StateSpec,
    TargetInfo,
    WeightsType,
    check_files,
    hash_file,
    parts,
    rank_name,
    read_manifest,
)

CONFIG, TEMPLATE = "config.json", "chat_template.jinja"
SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", TEMPLATE, "generation_config.json")


@contextlib.contextmanager
def staging(out: Path, what: str = "engine") -> Iterator[Path]:
    """A temporary sibling of `out` that becomes it if the block ends well, and else vanishes."""
    place = out.resolve()  # a link stays one
    remove_leftovers(place)
    folder = place.parent / f".{place.name}.building-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
        yield folder
        replace_folder(folder, place)
    except OSError as error:
        raise BuildError(f"{out}: can't write the {what} ({error.strerror or error})") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(out: Path) -> None:
    """Folders of builds of this engine whose process is gone (killed, power cut)."""
    for folder in out.parent.glob(".*-*"):
        stem, _, pid = folder.name.rpartition("-")
        ours = stem in (f".{out.name}.building", f".{out.name}.old")
        if ours and pid.isdecimal() and not is_running(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def is_running(pid: int) -> bool:
    """Whether another process has this id; what has our own is an earlier one's."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def replace_folder(new: Path, out: Path) -> None:
    old = out.parent / f".{out.name}.old-{os.getpid()}"
    if out.exists():
        out.rename(old)
    try:
        new.rename(out)
    except BaseException:
        if old.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def link(old: Path, new: Path) -> None:
    """The same file once more; a copy where the file system has no hard links."""
    try:
        os.link(old, new)
    except OSError:
        shutil.copyfile(old, new)


def share_file(path: Path, sha256: str, siblings: Path, within: str = "") -> bool:
    """Make `path` a hard link to the equal file of an engine in `siblings`, if there is one.

    within: the folder of a rank, in the sibling too.
    """
    for folder in sorted(siblings.glob(f"*/{within}")):
        manifest = existing(folder)
        spec = manifest.files.get(path.name) if manifest is not None else None
        other = folder / path.name
        if spec is None or spec.sha256 != sha256 or not other.is_file():
            continue
        if hash_file(other) != sha256:  # damaged since: never spread it
            continue
        path.unlink(missing_ok=True)
        link(other, path)
        return True
    return False


def rank_folders(folder: Path, plan: Plan) -> list[Path]:
    """Where weights and programs go, one per rank; the engine's folder itself if there is one."""
    if plan.tp == 1:
        return [folder]
    folders = [folder / rank_name(rank) for rank in range(plan.tp)]
    for place in folders:
        place.mkdir()
    return folders


def share_programs(first: Path, others: list[Path]) -> None:
    """Give the other ranks what was compiled for the first; only weights differ."""
    for place in others:
        for file in sorted(first.iterdir()):
            if not (place / file.name).exists():
                link(file, place / file.name)


def copy_side_files(checkpoint: Path, folder: Path) -> None:
    """config.json, and of `SIDE_FILES` those that the checkpoint has."""
    for name in (CONFIG, *SIDE_FILES):
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)
    template = _configured_template(folder / "tokenizer_config.json")
    if template is not None and not (folder / TEMPLATE).exists():
        (folder / TEMPLATE).write_text(template, encoding="utf-8")


def _configured_template(path: Path) -> str | None:
    """The chat template as older checkpoints carry it: inside tokenizer_config.json."""
    try:
        template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):  # the run time says what is wrong with the file
        return None
    return template if isinstance(template, str) else None


def write_manifest(
    folder: Path,
    *,
    plan: Plan,
    fingerprint: str,
    model: ModelInfo,
    target: TargetInfo,
    programs: dict[str, ProgramSpec],
    state: tuple[StateSpec, ...],
    weights: WeightsType,
    hashes: dict[str, str],
    rank: int | None = None,
) -> None:
    """Write engine.json over everything that lies in the folder; `hashes` are known already.

    rank: whose folder it is, if the engine has several.
    """
    drafters: list[str] = [] if plan.drafter is None else [plan.drafter]
    manifest = Manifest(
        mtpbuild=version("mtpbuild"),
        model=model,
        build=BuildInfo(
            nextn=plan.nextn,
            drafter=plan.drafter,
            adaptive=plan.adaptive,
            max_batch=plan.max_batch,
            max_seq_len=plan.max_seq_len,
            prefill_chunk=plan.prefill_chunk,
            weights=weights,
            dtype=plan.dtype,
            fingerprint=fingerprint,
            tp=plan.tp,
            ep=plan.ep,
        ),
        target=target,
        capabilities={"acceptance": ["strict", "rejection", "relaxed"], "drafter": drafters},
        lookahead=plan.lookahead,
        programs=programs,
        state=state,
        files=describe_files(folder, hashes),
        rank=rank,
    )
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def describe_files(folder: Path, known: dict[str, str]) -> dict[str, FileSpec]:
    return {
        path.name: FileSpec(
            size=path.stat().st_size, sha256=known.get(path.name) or hash_file(path)
        )
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST and path.is_file()
    }


def existing(out: Path) -> Manifest | None:
    """The manifest of an engine that stands at `out` already, if it can be read."""
    try:
        return read_manifest(out)
    except MtpbuildError:
        return None


def check_place(out: Path, model: str, *, force: bool) -> None:
    """Refuse to overwrite a folder that is not an engine, or another model's engine."""
    try:
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return
        if not (out / MANIFEST).is_file():
            raise BuildError(f"{out} exists and is not an engine; choose another --out")
    except OSError as error:
        raise BuildError(f"{out}: can't be used as --out ({error.strerror})") from None
    owner = model_of(out)
    if owner != model and not force:
        of = f"an engine of {owner}" if owner else f"an {MANIFEST} that can't be read"
        raise BuildError(f"{out} holds {of}; use --force to replace it, or choose another --out")


def model_of(out: Path) -> str | None:
    """Which model's engine stands at `out`, also one of another format version."""
    try:
        name = json.loads((out / MANIFEST).read_text(encoding="utf-8"))["model"]["name"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) else None


def same_engine(out: Path, fingerprint: str) -> bool:
    """Whether `out` is whole and was made from exactly the same inputs."""
    manifest = existing(out)
    if manifest is None or manifest.build.fingerprint != fingerprint:
        return False
    try:
        for folder, part in parts(out, manifest):
            check_files(folder, part)
    except (EngineError, OSError):
        return False
    return True
