"""The engines of this folder: how a name finds one, and what `mtpbuild list` says of each."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from mtpbuild.runtime.contract.manifest import (
    MANIFEST,
    MAX_MANIFEST,
    Manifest,
    list_engine_folders,
    read_manifest,
)
from mtpbuild.runtime.contract.rules import BUILT_IN
from mtpbuild.runtime.errors import EngineFileError, EngineFormatError, MtpbuildError, UsageError
from mtpbuild.runtime.files import read_json
from mtpbuild.runtime.tables import print_lines, print_table

# Of a model; True: without asking. The tuple names the rules of other packages that it must have.
MakeEngine: TypeAlias = Callable[[str, bool, tuple[str, ...]], Path]
ENGINES = Path("engines")  # of the current folder, where `mtpbuild build` puts them
COLUMNS = ("engine", "model", "nextn", "weights", "size", "context", "last use")


@dataclass(frozen=True)
class ListedEngine:
    """A line of `mtpbuild list`. `fault` says why the engine can't be used; None: it is whole."""

    name: str
    model: str | None = None
    nextn: str | None = None
    weights: str | None = None
    size: int | None = None  # bytes of its files; engines of one build share their weights
    context: int | None = None
    last_use: float | None = None  # seconds since 1970, of a build, a load or a change
    fault: str | None = None


def find_engine(name: Path) -> Path:
    """Return the engine's folder: the folder itself, else the engine of that name in engines/.

    A name that is neither is returned as it is, for `read_manifest` to refuse.
    """
    named = ENGINES / name
    return named if not (name / MANIFEST).is_file() and (named / MANIFEST).is_file() else name


def choose_engine(
    model: str | None,
    engine: Path | None,
    *,
    yes: bool,
    make_engine: MakeEngine | None,
    acceptance: str | None = None,
) -> Path:
    """Return the folder of the engine that is named: by --engine, or by a model's name.

    make_engine: makes the engine of a model that has none, if the compiler is at hand. acceptance:
    the rule that requests will ask for.
    """
    if (model is None) == (engine is None):
        raise UsageError("name one engine or model: mtpbuild run MODEL, or --engine FOLDER")
    folder = find_engine(Path(model or "") if engine is None else engine)
    known = (folder / MANIFEST).is_file() or ENGINES in folder.parents
    if model is None or make_engine is None or known:
        return folder
    rules = () if acceptance is None or acceptance in BUILT_IN else (acceptance,)
    return make_engine(model, yes, rules)


def list_folders() -> Iterator[Path]:
    """Yield the folders of engines/ in order; one without an engine may hold several engines."""
    for folder in sorted(ENGINES.glob("[!.]*/")):
        inner = [] if (folder / MANIFEST).is_file() else sorted(folder.glob(f"[!.]*/{MANIFEST}"))
        yield from [path.parent for path in inner] or [folder]


def describe_engine(folder: Path) -> ListedEngine:
    """Describe an engine by its manifest, and by its files' sizes; a broken one by its fault."""
    name = str(folder.relative_to(ENGINES))
    try:
        manifest = read_manifest(folder)
        size = sum(_count_bytes(*part) for part in list_engine_folders(folder, manifest))
    except MtpbuildError as error:
        return ListedEngine(name, fault=str(error).removeprefix(str(folder)).lstrip(":/ "))
    build = manifest.build
    return ListedEngine(
        name=name,
        model=manifest.model.name,
        nextn=build.drafts,
        weights=build.weights,
        size=size,
        context=build.max_seq_len,
        last_use=folder.stat().st_mtime,
    )


def _count_bytes(folder: Path, manifest: Manifest) -> int:
    """Return the bytes of a folder's files; raise EngineFileError if one differs in its size."""
    for name, spec in manifest.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != spec.size:
            raise EngineFileError(f"{path} is missing or not whole")
    return sum(spec.size for spec in manifest.files.values())


def print_engine_list(engines: Sequence[ListedEngine]) -> None:
    """Print a line per engine."""
    rows = [
        (
            *(e.name, str(e.model), str(e.nextn), str(e.weights)),
            *(f"{(e.size or 0) / 1e6:,.1f} MB", f"{e.context:,}", describe_time(e.last_use or 0)),
        )
        for e in engines
        if e.fault is None
    ]
    if rows:
        print_table([COLUMNS, *rows], texts=("model", "weights"))
    print_lines(*(f"{e.name}: broken: {e.fault}" for e in engines if e.fault is not None))


def describe_time(then: float, now: float | None = None) -> str:
    """Say how long ago a time was."""
    seconds = (time.time() if now is None else now) - then
    for name, unit in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if count := int(max(seconds, 0) // unit):
            return f"{count} {name}{'' if count == 1 else 's'} ago"
    return "now"


def find_removable(name: Path) -> Path:
    """Return the folder of an engine, whole or broken; raise EngineFormatError.

    A name is looked for under engines/.
    """
    folder = find_engine(name)
    if not (folder / MANIFEST).is_file():
        read_manifest(ENGINES / name if name.name and (ENGINES / name).is_dir() else name)
    return folder.resolve() if folder.name in ("", "..") else folder


def remove_folder(folder: Path) -> list[str]:
    """Remove an engine, or the link to one; return what is left, as it is not the engine's.

    Its manifest goes last, so that what an interruption leaves is a broken engine.
    """
    try:
        if folder.is_symlink():
            folder.unlink()
            return []
        files = _list_files(folder)
        for path in sorted(files, key=lambda path: (path.name == MANIFEST, -len(path.parts))):
            if path.is_symlink() or path.is_file():
                path.unlink()
        places = {place for path in files for place in path.parents}
        for place in sorted(places, key=lambda place: -len(place.parts)):
            if place.is_relative_to(folder) and place.is_dir() and not any(place.iterdir()):
                place.rmdir()
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise EngineFileError(f"{error.filename}: can't be removed ({error.strerror})") from None


def _list_files(folder: Path) -> set[Path]:
    """Return the files that an engine's manifest names, whichever mtpbuild built it."""
    files = set[Path]()
    for place in (folder, *folder.glob("rank[0-9]*/")):
        try:
            raw = read_json(place / MANIFEST, MAX_MANIFEST)
            if place == folder or raw["rank"] is not None:
                names = (PurePosixPath(name) for name in [*raw["files"], MANIFEST])
                files |= {place / name for name in names if ".." not in name.parts}
        except (OSError, ValueError, TypeError, KeyError):
            if place == folder:
                raise EngineFormatError(
                    f"{place / MANIFEST} does not say which files are the engine's: remove the "
                    "folder yourself"
                ) from None
    root = folder.resolve()
    return {path for path in files if path.parent.resolve().is_relative_to(root)}
