"""The memory that programs can still take, within the limits of system and control group."""

import os
import re
from pathlib import Path

UNKNOWN = 1 << 30  # bytes, on a system that does not report it


def free_memory(root: Path = Path("/")) -> int:
    """Return the number of bytes that are free without swapping, within a container's limit."""
    text, group = text_of(root / "proc/meminfo"), root / "sys/fs/cgroup"
    found = [1024 * int(kib) for kib in re.findall(r"^MemAvailable: +(\d+) kB$", text, re.M)]
    limit, used = (text_of(group / name).strip() for name in ("memory.max", "memory.current"))
    if limit.isdecimal() and used.isdecimal():  # "max": no limit
        found.append(max(0, int(limit) - int(used)))
    return min(found, default=UNKNOWN)


def text_of(path: Path) -> str:
    """Return the text of a system file; "" if it is missing or unreadable."""
    return path.read_text(encoding="utf-8") if os.access(path, os.R_OK) else ""
