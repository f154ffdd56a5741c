"""Find engines and their ranks on disk, share their files, and move them into place."""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from mtpbuild.builder.engine.staged import is_taken, replace_folder, stage_folder
from mtpbuild.runtime.contract.manifest import (
    MANIFEST,
    Manifest,
    check_files,
    hash_file,
    list_ranks_here,
    name_rank,
    read_manifest,
    read_rank,
)
from mtpbuild.runtime.errors import BuildError, EngineError, MtpbuildError
from mtpbuild.runtime.files import read_json
from mtpbuild.runtime.ranks import Ranks


def make_rank_folders(folder: Path, ranks: Ranks, wanted: Iterable[int]) -> dict[int, Path]:
    """Create and return the folder of each wanted rank; a single rank has the engine's folder."""
    folders = {rank: folder / name_rank(rank) if ranks.tp > 1 else folder for rank in wanted}
    for place in folders.values():
        place.mkdir(exist_ok=True)
    return folders


def link(old: Path, new: Path) -> None:
    """Make `new` a hard link to `old`, or a copy if the file system has no hard links.

    If `old` is a symbolic link, `new` is made from its target.
    """
    old = old.resolve()
    try:
        os.link(old, new)
    except OSError:
        shutil.copy(old, new)


@contextlib.contextmanager
def change_engine(
    engine: Path, kept: Iterable[str], modes: Mapping[str, int] | None = None
) -> Iterator[Path]:
    """Make a folder that replaces the engine if the block succeeds.

    kept: files to take over from the engine. modes: of files whose mode is not the engine's.
    """
    with stage_folder(engine) as staged:
        for name in kept:
            (staged.folder / name).parent.mkdir(parents=True, exist_ok=True)
            link(engine / name, staged.folder / name)
        yield staged.folder
        keep_access(engine, staged.folder)
        for name, mode in (modes or {}).items():
            (staged.folder / name).chmod(mode)


def keep_access(engine: Path, folder: Path) -> None:
    """Give a folder that will replace an engine, and its new files, the engine's modes and owners.

    A file that the engine lacks gets those of its manifest. Files that are linked do not change.
    """
    copy_access(engine, folder)
    for path in folder.rglob("*"):
        old = engine / path.relative_to(folder)
        if path.is_dir():
            copy_access(engine, path)
        elif not old.exists():
            copy_access(engine / MANIFEST, path)
        elif not old.samefile(path):
            copy_access(old, path)


def copy_access(old: Path, new: Path) -> None:
    """Copy the mode of a file or folder to another, and the owner where this user may set it."""
    access = old.stat()
    with contextlib.suppress(OSError):  # the owner first, as chown may clear mode bits
        os.chown(new, access.st_uid, access.st_gid)
    new.chmod(access.st_mode & 0o7777)


def share_file(path: Path, sha256: str, siblings: Path, inner: str = "") -> bool:
    """Make `path` a hard link to the equal file of an engine in `siblings`, if there is one.

    Returns whether there was one. inner: the name of the rank's folder, the same in both engines;
    "" for an engine of one rank.
    """
    for folder in sorted(siblings.glob(f"*/{inner}")):
        manifest = find_engine(folder)
        spec = manifest.files.get(path.name) if manifest is not None else None
        other = folder / path.name
        listed = spec is not None and spec.sha256 == sha256 and other.is_file()
        if listed and hash_file(other) == sha256:  # never spread a damaged file
            path.unlink(missing_ok=True)
            link(other, path)
            return True
    return False


def share_programs(first: Path, others: Iterable[Path]) -> None:
    """Link the first rank's programs into the other ranks' folders."""
    for place in others:
        for file in sorted(first.iterdir()):
            if file.name != MANIFEST and not (place / file.name).exists():
                link(file, place / file.name)


def find_engine(out: Path, fingerprint: str | None = None) -> Manifest | None:
    """Return the manifest of the engine at `out`, or None if there is no readable one.

    fingerprint: if given, the engine must have it.
    """
    try:
        manifest = read_manifest(out)
    except MtpbuildError:
        return None
    return manifest if fingerprint in (None, manifest.build.fingerprint) else None


def check_place(out: Path, model: str, *, force: bool) -> None:
    """Refuse to overwrite a folder that is not an engine, or another model's engine."""
    if not is_taken(out, MANIFEST, "an engine"):
        return
    owner = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # of any format version
        owner = read_json(out / MANIFEST)["model"]["name"]
    if owner != model and not force:
        of = f"an engine of {owner}" if owner else f"an {MANIFEST} that can't be read"
        raise BuildError(f"{out} holds {of}; use --force to replace it, or choose another --out")


def refuse_mixed_ranks(out: Path, fingerprint: str, *, force: bool) -> None:
    """Raise BuildError if a single rank would replace the ranks of another build."""
    manifest = find_engine(out)
    if manifest is None or force or not list_ranks_here(out, manifest):
        return
    if manifest.build.fingerprint != fingerprint:
        raise BuildError(
            f"{out} holds ranks of another build (other flags, checkpoint or versions); use "
            "--force to replace them, or choose another --out"
        )


def find_missing_ranks(out: Path, fingerprint: str, ranks: Iterable[int]) -> list[int]:
    """Return the ranks at `out` that are missing, damaged, or made from other inputs.

    An engine that is not split counts as rank 0.
    """
    manifest = find_engine(out, fingerprint)
    if manifest is None or not _is_intact(out, manifest):
        return list(ranks)
    return [rank for rank in ranks if manifest.split and not _is_intact(out, manifest, rank)]


def find_intact_rank(out: Path, fingerprint: str) -> Path | None:
    """Return the folder of the first intact rank at `out` that this build made, if any."""
    if (manifest := find_engine(out, fingerprint)) is None:
        return None
    intact = (rank for rank in list_ranks_here(out, manifest) if _is_intact(out, manifest, rank))
    return next((out / name_rank(rank) for rank in intact), None)


def _is_intact(out: Path, manifest: Manifest, rank: int | None = None) -> bool:
    """Return whether the engine's own files, or one rank's files, are as they were built."""
    try:
        if rank is None:
            check_files(out, manifest)
        else:
            check_files(out / name_rank(rank), read_rank(out, manifest, rank))
    except (EngineError, OSError):
        return False
    return True


def publish(new: Path, out: Path) -> None:
    """Move an engine into place; ranks that were built alone join the others of their build."""
    manifest = read_manifest(new)
    ranks = list_ranks_here(new, manifest)
    if len(ranks) == manifest.build.tp or not manifest.split:
        replace_folder(new, out)
        return
    with contextlib.suppress(OSError):  # fails if `out` is there, perhaps made just now
        new.rename(out)
        return
    other = find_engine(out)
    if other is None or other.build != manifest.build:
        replace_folder(new, out)
        return
    for rank in ranks:
        name = name_rank(rank)
        shutil.rmtree(out / name, ignore_errors=True)  # damaged, or to be replaced
        (new / name).rename(out / name)
    for file in (path for path in new.iterdir() if path.is_file()):
        file.replace(out / file.name)
