"""Says how much memory programs can still take, by the system and by its limits for a group."""

import os
import re
from pathlib import Path

UNKNOWN = 1 << 30  # bytes, on a system that does not say


def free_memory(root: Path = Path("/")) -> int:
    """Returns the bytes that can be taken without swapping; containers may have fewer."""
    text, group = text_of(root / "proc/meminfo"), root / "sys/fs/cgroup"
    found = [1024 * int(kib) for kib in re.findall(r"^MemAvailable: +(\d+) kB$", text, re.M)]
    limit, used = (text_of(group / name).strip() for name in ("memory.max", "memory.current"))
    if limit.isdecimal() and used.isdecimal():  # "max": there is no limit
        found.append(max(0, int(limit) - int(used)))
    return min(found, default=UNKNOWN)


def text_of(path: Path) -> str:
    """Returns what a file of the system says; nothing where it is missing or may not be read."""
    return path.read_text(encoding="utf-8") if os.access(path, os.R_OK) else ""
