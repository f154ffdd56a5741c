"""What this process may take of its machine: memory, and processors.

Control groups, of either version, limit both: containers and systemd's MemoryMax= and CPUQuota= use
them.
"""

import math
import os
import platform
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

UNKNOWN = 1 << 30  # bytes that are free on a system that does not report it
SYSTEM = Path("/")
# Files of a group's limit and use of memory, of version 2 and of version 1.
MEMORY = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


@dataclass(frozen=True)
class Limits:
    """Bytes of memory in all (None: unknown) and free without swapping; number of processors."""

    memory: int | None
    free: int
    processors: int


def measure_limits(root: Path = SYSTEM, usable: Collection[int] | None = None) -> Limits:
    """Measure what this process may take.

    root: the system's files. usable: processor numbers; by default those that the process may use.
    """
    text = read_or_empty(root / "proc/meminfo")
    sizes = {key: 1024 * int(kib) for key, kib in re.findall(r"^(\w+): +(\d+) kB$", text, re.M)}
    groups = [
        reading for group in _find_groups(root, "memory") for reading in _read_group_memory(group)
    ]
    memory = [limit for limit, _ in groups] + [sizes[key] for key in ("MemTotal",) if key in sizes]
    free = [max(0, limit - used) for limit, used in groups]
    free += [sizes[key] for key in ("MemAvailable",) if key in sizes]
    quota = min(map(_read_quota, _find_groups(root, "cpu")), default=math.inf)
    processors = int(max(1, min(len(list_usable_processors(usable)), quota)))
    return Limits(min(memory, default=None), min(free, default=UNKNOWN), processors)


def read_cpu_name() -> str:
    """Find the processor's name, in /proc/cpuinfo or by Python's `platform`."""
    if match := re.search(
        r"^model name\s*:(.*)", read_or_empty(SYSTEM / "proc/cpuinfo"), re.MULTILINE
    ):
        return match[1].strip()
    return platform.processor() or platform.machine()


def list_usable_processors(usable: Collection[int] | None = None) -> Collection[int]:
    """Return the numbers of the processors that the process may use, or those given."""
    if usable is None and hasattr(os, "sched_getaffinity"):  # Linux
        usable = os.sched_getaffinity(0)
    return range(os.cpu_count() or 1) if usable is None else usable


def _find_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the process's control groups, and of all groups around them.

    A container may name a group that it can't see; its own group is then the top.
    """
    top = root / "sys/fs/cgroup"
    paths = {top: "", top / controller: ""}  # of version 2 and of version 1
    for line in read_or_empty(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if not names or controller in names.split(","):
            paths[top / controller if names else top] = path.strip("/")
    for mount, path in paths.items():
        group = mount / path
        yield from (each for each in (group, *group.parents) if each.is_relative_to(mount))


def _read_group_memory(group: Path) -> Iterator[tuple[int, int]]:
    """Yield a group's limit and use of memory, if it has a limit; cached files can be dropped."""
    cached = re.findall(
        r"^(?:total_)?inactive_file (\d+)$", read_or_empty(group / "memory.stat"), re.M
    )
    for names in MEMORY:
        limit, used = (read_or_empty(group / name).strip() for name in names)
        if limit.isdecimal() and used.isdecimal():  # "max": no limit
            yield int(limit), int(used) - max(map(int, cached), default=0)


def _read_quota(group: Path) -> float:
    """Return the number of processors whose time a group may use; infinity: no limit."""
    old = (read_or_empty(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    for text in (read_or_empty(group / "cpu.max"), " ".join(old)):
        if match := re.fullmatch(r"(\d+) ([1-9]\d*)\s*", text):  # else "max" or -1
            return math.ceil(int(match[1]) / int(match[2]))
    return math.inf


def read_or_empty(path: Path) -> str:
    """Return the text of a system file; "" if it is missing or unreadable."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
