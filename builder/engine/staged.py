"""Build an engine in a hidden folder beside its place, and move it there by one rename.

A build that ends early leaves its finished parts in that folder, with a journal that lists them.
The next build of the same inputs reuses them. A lock lets only one build at a time use the folder.
"""

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from mtpbuild.runtime.contract.manifest import ProgramSpec, hash_file, name_rank
from mtpbuild.runtime.errors import BuildError, explain_missing_package

JOURNAL = "parts.jsonl"  # the first line names the inputs, then each finished part has a line
LOCK = "lock"

logger = logging.getLogger(__name__)


class FinishedPart(BaseModel):
    """A finished part of the engine; `files` maps paths in the engine to their sha256."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    files: dict[str, str]
    program: ProgramSpec | None = None


class StagedFolder:
    """An unfinished engine: `folder` becomes the engine, `finished` lists the parts so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.finished: dict[str, FinishedPart] = {}
        self._journal = folder.parent / JOURNAL

    def resume(self, inputs: str, *, discard_parts: bool) -> None:
        """Keep the intact parts of an earlier build of the same inputs, and remove all else."""
        earlier_inputs, *lines = _read(self._journal).splitlines() or [""]
        parts = _parse(lines) if earlier_inputs == inputs and not discard_parts else []
        self.finished = {part.name: part for part in parts if self._is_intact(part)}
        lines = [inputs, *(part.model_dump_json() for part in self.finished.values())]
        self._journal.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        self.folder.mkdir(exist_ok=True)
        self.prune()

    def add(self, name: str, files: Mapping[Path, str], program: ProgramSpec | None = None) -> None:
        """Record a finished part in the journal; files: path -> sha256."""
        named = {path.relative_to(self.folder).as_posix(): files[path] for path in sorted(files)}
        part = FinishedPart(name=name, files=named, program=program)
        if self.finished.get(name) == part:
            return
        self.finished[name] = part
        with self._journal.open("a", encoding="utf-8") as journal:
            journal.write(part.model_dump_json() + "\n")

    def hashes(self, place: Path) -> dict[str, str]:
        """Return the sha256 of each finished file in one of the engine's folders, by name."""
        files = [item for part in self.finished.values() for item in part.files.items()]
        paths = ((self.folder / name, sha256) for name, sha256 in files)
        return {path.name: sha256 for path, sha256 in paths if path.parent == place}

    def prune(self) -> None:
        """Remove all files that belong to no finished part."""
        kept = {self.folder / name for part in self.finished.values() for name in part.files}
        for path in sorted(self.folder.rglob("*"), reverse=True):  # files before their folder
            if path.is_symlink() or not path.is_dir():
                if path not in kept:
                    path.unlink()
            elif not any(path.iterdir()):
                path.rmdir()

    def _is_intact(self, part: FinishedPart) -> bool:
        try:
            return all(hash_file(self.folder / name) == part.files[name] for name in part.files)
        except OSError:
            return False


def _read(journal: Path) -> str:
    return journal.read_text(encoding="utf-8", errors="replace") if journal.exists() else ""


def _parse(lines: list[str]) -> list[FinishedPart]:
    """Parse a journal's parts up to the first incomplete line."""
    parts = []
    with contextlib.suppress(ValidationError):  # a build was cut off while it wrote the line
        for line in lines:
            parts.append(FinishedPart.model_validate_json(line))
    return parts


def replace_folder(new: Path, out: Path) -> None:
    """Move a folder to `out` in place of an older one, which is restored if that fails."""
    old = _backup(out)
    if out.exists():
        out.rename(old)
    try:
        new.rename(out)
    except BaseException:
        if old.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def is_taken(out: Path, mark: str, what: str) -> bool:
    """Return whether `out` holds a file `mark`; raise BuildError if it holds anything else."""
    try:
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return False
        if not (out / mark).is_file():
            raise BuildError(f"{out} exists and is not {what}; choose another --out")
    except OSError as error:
        raise BuildError(f"{out}: can't be used as --out ({error.strerror})") from None
    return True


def _backup(out: Path) -> Path:
    return out.parent / f".{out.name}.old"


@contextlib.contextmanager
def stage_folder(
    out: Path,
    what: str = "engine",
    *,
    inputs: str = "",
    discard_parts: bool = True,
    rank: int | None = None,
    put: Callable[[Path, Path], None] = replace_folder,
) -> Iterator[StagedFolder]:
    """Make a folder beside `out`, and move it to `out` if the block succeeds.

    If the block fails, its finished parts stay for the next build of the same inputs, unless that
    build has `discard_parts`. rank: the only rank that is built, if any; builds of other ranks may
    run at the same time. put: moves the folder into place. Raises BuildError if the folder can't be
    written, or if another process builds the same engine.
    """
    place = out.resolve()  # if `out` is a link, its target is replaced
    home = _staging_path(place, rank)
    try:
        with _lock(home, out):
            _restore_replaced(place)
            staged = StagedFolder(home / place.name)
            try:
                staged.resume(inputs, discard_parts=discard_parts)
                if staged.finished:
                    logger.warning("resuming %s: %s done", out, ", ".join(staged.finished))
                yield staged
                put(staged.folder, place)
                staged.finished.clear()
            finally:
                _keep_or_remove(staged, home, out)
    except OSError as error:
        raise BuildError(f"{out}: can't write the {what} ({error.strerror or error})") from None


def discard_stale(out: Path, fingerprint: str, *, rank: int | None = None) -> None:
    """Remove the parts that an interrupted build of a now finished engine left.

    Parts of other inputs stay, and so do those of a running build.
    """
    place = out.resolve()
    home = _staging_path(place, rank)
    with contextlib.suppress(OSError, BuildError):  # another build has it, or it can't be read
        if (home / JOURNAL).exists() and _read(home / JOURNAL).startswith(fingerprint):
            with _lock(home, out):
                _keep_or_remove(StagedFolder(home / place.name), home, out)


def count_staged_bytes(out: Path, rank: int | None = None) -> int:
    """Return the bytes of the parts that an interrupted build left; 0 without such a build."""
    home = _staging_path(out.resolve(), rank)
    return sum(path.stat().st_size for path in home.rglob("*") if path.is_file())


def _staging_path(place: Path, rank: int | None) -> Path:
    alone = "" if rank is None else f".{name_rank(rank)}"
    return place.parent / f".{place.name}{alone}.building"


@contextlib.contextmanager
def _lock(home: Path, out: Path) -> Iterator[None]:
    """Create `home`, and lock other processes out of it."""
    with explain_missing_package("a build", "build", "filelock"):
        from filelock import FileLock, Timeout

    lock = FileLock(home / LOCK, timeout=0.2, fallback_to_soft=False)
    while not lock.is_locked:
        home.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise BuildError(f"{out}: another build of it is at work") from None
        except FileNotFoundError:
            continue  # another build has just ended and removed the folder
        except OSError:
            break  # a file system without locks
    try:
        yield
    finally:
        lock.release()


def _restore_replaced(out: Path) -> None:
    """Restore the engine that a killed build had moved aside, if nothing has taken its place."""
    old = _backup(out)
    if old.exists() and not out.exists():
        old.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _keep_or_remove(staged: StagedFolder, home: Path, out: Path) -> None:
    """Keep the finished parts; if there are none, remove the folder."""
    with contextlib.suppress(OSError):  # never hide the error that ended the build
        if staged.finished:
            staged.prune()
            logger.warning(
                "note: the same build of %s goes on from what is finished: %s, in %s",
                out,
                ", ".join(staged.finished),
                home,
            )
            return
        shutil.rmtree(home, ignore_errors=True)
