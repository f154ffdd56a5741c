"""A prefix cache's entries in a folder, written in the background and found after a restart."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.errors import UsageError, explain_missing_package
from mtpbuild.runtime.prefix_cache.files import STATES, Arrays, PrefixFiles
from mtpbuild.runtime.prefix_cache.tree import CacheEntry, RowSpan

if TYPE_CHECKING:
    from filelock import BaseFileLock

SUFFIX = ".rows"
MAX_WAITING = 1 << 28  # bytes of entries that wait to be written
log = logging.getLogger("mtpbuild")


class PrefixFolder:
    """The files of one engine and one process, by key; unusable files are removed.

    A file has a temporary name until it is complete, in case the process is killed.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._files = folder, PrefixFiles(manifest)
        self._failed = False  # whether a write has failed
        self._queued = self._written = 0  # bytes in total; each counter changes in one thread alone
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _lock_folder(folder)
            try:
                for part in folder.glob(f".*{SUFFIX}.*"):
                    part.unlink()
            except OSError:
                self._lock.release()
                raise
        except OSError as error:
            raise UsageError(f"{folder}: can't be used for prefixes ({error.strerror})") from None
        self._thread = threading.Thread(
            target=self._write_queued, name="mtpbuild prefixes", daemon=True
        )
        self._thread.start()

    def spans(self) -> Iterator[RowSpan]:
        """Yield the spans of earlier processes' files, the oldest first; remove unusable files."""
        paths = [path for path in self._folder.iterdir() if path.suffix == SUFFIX]
        foreign = 0
        for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns):
            try:
                file = self._files.open(path)
                span = file.span if file.about["engine"] == self._files.engine else None
                if span is not None and span.key != path.stem:
                    raise ValueError("its name is not the one that it should have")
            except (ValueError, LookupError, OSError) as error:
                log.warning("%s: removed, as it can't be used (%s)", path, error)
            else:
                if span is not None:
                    yield span
                    continue
                foreign += 1
            path.unlink(missing_ok=True)
        if foreign:
            log.warning("%s: %d files of another engine were removed", self._folder, foreign)

    def write(self, entry: CacheEntry, arrays: Arrays) -> None:
        """Queue an entry to be written; its arrays must not change.

        If the disk is too slow, some entries are not written, so that the queue stays small.
        """
        size = sum(array.nbytes for array in arrays.values())
        if self._queued + size - self._written > MAX_WAITING:
            return
        self._queued += size
        span = entry.span
        if span.states:
            rows = len(span.tokens) - self._files.lookahead
            arrays = {STATES.format(name, rows): array for name, array in arrays.items()}

        def job() -> None:
            try:
                self._files.write(self._find_path(entry.key), span, arrays)
            finally:
                self._written += size

        self._jobs.put(job)

    def read(self, key: str) -> Arrays | None:
        """Return an entry's arrays; None with a warning if its file is damaged."""
        path = self._find_path(key)
        try:
            file = self._files.open(path, mapped=False)
            if not file.is_whole:
                raise ValueError("its bytes differ from its hash")
        except (ValueError, OSError) as error:
            log.warning("%s: damaged, so its tokens are filled in anew (%s)", path, error)
            return None
        return file.rows or next(iter(file.states.values()))

    def delete(self, key: str) -> None:
        self._jobs.put(lambda: self._find_path(key).unlink(missing_ok=True))

    def close(self) -> None:
        """Wait until everything is written, and unlock the folder."""
        self._jobs.put(None)
        self._thread.join()
        self._lock.release()

    def _write_queued(self) -> None:
        while job := self._jobs.get():
            try:
                job()
            except OSError as error:
                if not self._failed:
                    why = error.strerror
                    log.warning("%s: prefixes can't be written (%s)", self._folder, why)
                self._failed = True

    def _find_path(self, key: str) -> Path:
        return self._folder / f"{key}{SUFFIX}"


def _lock_folder(folder: Path) -> "BaseFileLock":
    """Lock a folder for this process; raise UsageError if another process has it."""
    with explain_missing_package("prefix_cache_dir", "serve"):
        from filelock import FileLock, Timeout
    lock = FileLock(folder / "lock", timeout=0.2)
    try:
        lock.acquire()
    except Timeout:
        raise UsageError(f"{folder}: another process keeps its prefixes there") from None
    return lock
