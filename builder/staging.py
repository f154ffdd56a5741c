"""Where an engine is made: a hidden sibling of its place, which becomes it by one rename.

A build that ends early leaves its finished parts there, with a journal of them, for the next build
of the same inputs. One build at a time is at work in it: it holds a lock on the journal.
"""

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, ValidationError

from mtpbuild.runtime.errors import BuildError
from mtpbuild.runtime.manifest import ProgramSpec, hash_file

JOURNAL = "parts.jsonl"  # a line that tells the inputs, then one per finished part

logger = logging.getLogger(__name__)


class Part(BaseModel):
    """Something that is finished, and its files: path in the engine -> sha256."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    files: dict[str, str]
    program: ProgramSpec | None = None


class Staging:
    """`folder` becomes the engine; `parts` of it are finished."""

    def __init__(self, folder: Path, journal: IO[str]) -> None:
        self.folder = folder
        self.parts: dict[str, Part] = {}
        self._journal = journal

    def resume(self, inputs: str, *, anew: bool) -> None:
        """Take over what was made of the same inputs, if it is as it was; remove all else."""
        self._journal.seek(0)
        before, *lines = self._journal.read().splitlines() or [""]
        found = _parse(lines) if before == inputs and not anew else []
        self.parts = {part.name: part for part in found if self._is_intact(part)}
        self._journal.truncate(0)
        lines = [inputs, *(part.model_dump_json() for part in self.parts.values())]
        self._journal.writelines(f"{line}\n" for line in lines)
        self._journal.flush()
        self.folder.mkdir(exist_ok=True)
        self.prune()

    def add(self, name: str, files: Mapping[Path, str], program: ProgramSpec | None = None) -> None:
        """Note that a part is finished; files: path -> sha256."""
        named = {path.relative_to(self.folder).as_posix(): files[path] for path in sorted(files)}
        part = Part(name=name, files=named, program=program)
        if self.parts.get(name) == part:
            return
        self.parts[name] = part
        self._journal.write(part.model_dump_json() + "\n")
        self._journal.flush()

    def hashes(self, place: Path) -> dict[str, str]:
        """File name -> sha256 of what is finished in one folder of the engine."""
        files = [item for part in self.parts.values() for item in part.files.items()]
        paths = ((self.folder / name, sha256) for name, sha256 in files)
        return {path.name: sha256 for path, sha256 in paths if path.parent == place}

    def prune(self) -> None:
        """Remove all but finished parts."""
        kept = {self.folder / name for part in self.parts.values() for name in part.files}
        for path in sorted(self.folder.rglob("*"), reverse=True):  # what is in a folder before it
            if path.is_symlink() or not path.is_dir():
                if path not in kept:
                    path.unlink()
            elif not any(path.iterdir()):
                path.rmdir()

    def _is_intact(self, part: Part) -> bool:
        try:
            return all(hash_file(self.folder / name) == part.files[name] for name in part.files)
        except OSError:
            return False


def _parse(lines: list[str]) -> list[Part]:
    """Up to the first that was not written to its end."""
    parts = []
    for line in lines:
        try:
            parts.append(Part.model_validate_json(line))
        except ValidationError:
            break
    return parts


def replace_folder(new: Path, out: Path) -> None:
    """Put a folder where another one may be; that one comes back if the rename fails."""
    old = _old(out)
    if out.exists():
        out.rename(old)
    try:
        new.rename(out)
    except BaseException:
        if old.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _old(out: Path) -> Path:
    return out.parent / f".{out.name}.old"


@contextlib.contextmanager
def staging(
    out: Path,
    what: str = "engine",
    *,
    inputs: str = "",
    anew: bool = True,
    part: str = "",
    put: Callable[[Path, Path], None] = replace_folder,
) -> Iterator[Staging]:
    """A temporary sibling of `out` that becomes it if the block ends well.

    If not, finished parts stay for the next build, unless it has other inputs or begins `anew`.
    part: of the engine that is built alone, beside others. put: how the folder gets to its place.
    Raises BuildError if it can't be written, or another process is at work on the same.
    """
    place = out.resolve()  # a link stays one
    home = place.parent / f".{place.name}{part and '.'}{part}.building"
    try:
        with _locked(home, out) as journal:
            _undo_replacing(place)
            stage = Staging(home / place.name, journal)
            try:
                stage.resume(inputs, anew=anew)
                if stage.parts:
                    logger.warning("resuming %s: %s done", out, ", ".join(stage.parts))
                yield stage
                put(stage.folder, place)
                stage.parts.clear()
            finally:
                _leave(stage, home, out)
    except OSError as error:
        raise BuildError(f"{out}: can't write the {what} ({error.strerror or error})") from None


@contextlib.contextmanager
def _locked(home: Path, out: Path) -> Iterator[IO[str]]:
    """The journal in `home`, which is made; for one process at a time."""
    while True:
        home.mkdir(parents=True, exist_ok=True)
        with (home / JOURNAL).open("a+", encoding="utf-8", errors="replace") as journal:
            try:
                fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BuildError(f"{out}: another build of it is at work") from None
            except OSError:
                pass  # a file system without locks
            if os.fstat(journal.fileno()).st_nlink:
                yield journal
                return
            # Whoever had the lock has just ended and removed the file.


def _undo_replacing(out: Path) -> None:
    """Of a build that was killed while it replaced the engine."""
    old = _old(out)
    if old.exists() and not out.exists():
        old.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _leave(stage: Staging, home: Path, out: Path) -> None:
    """Keep finished parts and nothing else."""
    with contextlib.suppress(OSError):  # what ended the build is what matters
        if stage.parts:
            stage.prune()
            logger.warning(
                "note: the same build of %s goes on from what is finished: %s, in %s",
                out,
                ", ".join(stage.parts),
                home,
            )
            return
        shutil.rmtree(stage.folder, ignore_errors=True)
        (home / JOURNAL).unlink()
        home.rmdir()
