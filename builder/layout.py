"""Turns lowered files into an engine directory: manifest, hashes, and one atomic rename."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.plan import Plan
from mtpbuild.builder.staging import replace_folder
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
    rank_name,
    ranks_here,
    read_manifest,
    read_rank,
)

CONFIG, TEMPLATE = "config.json", "chat_template.jinja"
SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", TEMPLATE, "generation_config.json")


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


def rank_folders(folder: Path, plan: Plan, ranks: Iterable[int]) -> dict[int, Path]:
    """Where weights and programs of each rank go; the engine's own folder if there is but one."""
    if plan.tp == 1:
        return {0: folder}
    folders = {rank: folder / rank_name(rank) for rank in ranks}
    for place in folders.values():
        place.mkdir(exist_ok=True)
    return folders


def share_programs(first: Path, others: Iterable[Path]) -> None:
    """Give other ranks what was compiled for the first; only weights differ."""
    for place in others:
        for file in sorted(first.iterdir()):
            if file.name != MANIFEST and not (place / file.name).exists():
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
    layers: LayersSlice | None = None,
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
            attention_dp=plan.attention_dp,
            layers=None if layers is None else str(layers),
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


def check_ranks(out: Path, fingerprint: str, *, force: bool) -> None:
    """Refuse to replace ranks of another build by a single one."""
    manifest = existing(out)
    if manifest is None or force or not ranks_here(out, manifest):
        return
    if manifest.build.fingerprint != fingerprint:
        raise BuildError(
            f"{out} holds ranks of another build (other flags, checkpoint or versions); use "
            "--force to replace them, or choose another --out"
        )


def lacking(out: Path, fingerprint: str, ranks: Iterable[int]) -> list[int]:
    """Which ranks are not at `out`, whole and made from exactly these inputs.

    An engine that is not split is its rank 0.
    """
    manifest = existing(out)
    if manifest is None or manifest.build.fingerprint != fingerprint or not _whole(out, manifest):
        return list(ranks)
    return [rank for rank in ranks if manifest.split and _whole_rank(out, manifest, rank) is None]


@dataclass(frozen=True)
class Rank:
    """One of several, in its folder."""

    folder: Path
    manifest: Manifest


def whole_rank(out: Path, fingerprint: str) -> Rank | None:
    """The first rank of a build that is at `out` and as it was built."""
    manifest = existing(out)
    if manifest is None or manifest.build.fingerprint != fingerprint:
        return None
    found = (_whole_rank(out, manifest, rank) for rank in ranks_here(out, manifest))
    return next((rank for rank in found if rank is not None), None)


def _whole_rank(out: Path, manifest: Manifest, rank: int) -> Rank | None:
    try:
        found = Rank(out / rank_name(rank), read_rank(out, manifest, rank))
    except EngineError:
        return None
    return found if _whole(found.folder, found.manifest) else None


def _whole(folder: Path, manifest: Manifest) -> bool:
    try:
        check_files(folder, manifest)
    except (EngineError, OSError):
        return False
    return True


def publish(new: Path, out: Path) -> None:
    """Put an engine at its place; some of several ranks go to others of the same build there."""
    own = read_manifest(new)
    ranks = ranks_here(new, own)
    if len(ranks) == own.build.tp or not own.split:
        replace_folder(new, out)
        return
    with contextlib.suppress(OSError):  # something is there, perhaps since a moment ago
        new.rename(out)
        return
    there = existing(out)
    if there is None or there.build != own.build:
        replace_folder(new, out)
        return
    for rank in ranks:
        name = rank_name(rank)
        shutil.rmtree(out / name, ignore_errors=True)  # damaged, or not wanted
        (new / name).rename(out / name)
    for file in (path for path in new.iterdir() if path.is_file()):
        file.replace(out / file.name)
