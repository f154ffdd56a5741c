"""Says how much memory programs can still take, by the system and by its limits for a group."""

import re
from pathlib import Path

UNKNOWN = 1 << 30  # bytes, on a system that does not say


def free_memory(root: Path = Path("/")) -> int:
    """Returns the bytes that can be taken without swapping; containers may have fewer."""
    found = list[int]()
    try:
        text = (root / "proc/meminfo").read_text(encoding="utf-8")
        found += [1024 * int(kib) for kib in re.findall(r"^MemAvailable: +(\d+) kB$", text, re.M)]
        group = root / "sys/fs/cgroup"
        limit, used = ((group / name).read_text() for name in ("memory.max", "memory.current"))
        found.append(max(0, int(limit) - int(used)))  # "max": there is no limit
    except (OSError, ValueError):
        pass
    return min(found, default=UNKNOWN)
