"""Reading of untrusted files, and replacing of files.

Anything but a regular file is refused, as opening it might hang. Links are followed, since the
caches of hubs consist of them. All errors are OSError or ValueError.
"""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MAX_TEXT = 1 << 26  # bytes of configurations, indices and templates; the largest known has 14 MB
MAX_TOKENIZER = 1 << 28  # bytes of a tokenizer.json
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: Path, limit: int | None = None) -> os.stat_result:
    """Return the status of a file, or of a link's target.

    Raises OSError if it is not a regular file or has more than `limit` bytes.
    """
    status = path.stat()
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        what = KINDS.get(kind, "something else")
        raise OSError(errno.EINVAL, f"{what}, not a regular file", str(path))
    if limit is not None and status.st_size > limit:
        says = f"{status.st_size:,} bytes, of which {limit:,} at most are read"
        raise OSError(errno.EFBIG, says, str(path))
    return status


def read_text(path: Path, limit: int = MAX_TEXT) -> str:
    """Return a UTF-8 text with unchanged line ends, but without a byte order mark."""
    size = check_regular(path, limit).st_size
    with path.open("rb") as file:
        return file.read(size).decode("utf-8-sig")


def read_json(path: Path, limit: int = MAX_TEXT) -> Any:
    try:
        return json.loads(read_text(path, limit))
    except RecursionError:
        raise ValueError("nested too deeply") from None


@contextlib.contextmanager
def replace_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a new file beside `path`, which takes its place after the block.

    Readers see the old file or the whole new one. If the block raises, nothing has changed. mode:
    the file's permissions, less the process's umask.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(part, flags, mode), "wb") as file:
            yield file
        part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def find_user_cache() -> Path:
    """Return the folder of files that are safe to delete, below XDG_CACHE_HOME or ~/.cache."""
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "mtpbuild"
    try:
        return Path.home() / ".cache" / "mtpbuild"
    except RuntimeError:  # a container whose user is not in its passwd
        raise OSError(errno.ENOENT, "this user has no home folder: set XDG_CACHE_HOME") from None


def format_size(size: float) -> str:
    """Format a number of bytes in the largest unit of which it has one or more."""
    units = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
    name, unit = next((u for u in units if size >= u[1]), ("bytes", 1))
    return f"{size:,.0f} bytes" if unit == 1 else f"{size / unit:,.2f} {name}"
