"""Reads files that may come from anywhere: what is no regular file is never opened, or it may hang.

A link may lead elsewhere, as those of a hub's cache do. All errors are OSError or ValueError.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_TEXT = 1 << 26  # bytes of configurations, indices and templates; the largest known has 14 MB
MOST_TOKENIZER = 1 << 28  # bytes of a tokenizer.json
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: Path, most: int | None = None) -> os.stat_result:
    """Return the state of a file, or of that to which a link leads.

    OSError if it is not regular, or has more than `most` bytes.
    """
    found = path.stat()
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        what = KINDS.get(kind, "something else")
        raise OSError(errno.EINVAL, f"{what}, not a regular file", str(path))
    if most is not None and found.st_size > most:
        says = f"{found.st_size:,} bytes, of which {most:,} at most are read"
        raise OSError(errno.EFBIG, says, str(path))
    return found


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """Return a text in UTF-8, with its line ends as they are."""
    check_regular(path, most)
    with path.open("rb") as file:
        return file.read(most).decode("utf-8")


def read_json(path: Path, most: int = MOST_TEXT) -> Any:
    try:
        return json.loads(read_text(path, most))
    except RecursionError:
        raise ValueError("nested too deeply") from None
