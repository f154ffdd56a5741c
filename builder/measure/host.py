"""Describe and measure this machine: processor, load, versions, memory, disks."""

import math
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from mtpbuild.builder.checkpoint.hub_cache import cache_folder
from mtpbuild.builder.show.tables import format_size
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.limits import SYSTEM, measure_limits, read_cpu_name, read_or_empty

READ = 1 << 28  # bytes, more than caches hold
# Those that our CPU kernels are compiled for, as Linux names them; processors of one name differ.
INSTRUCTIONS = ("avx2", "avx_vnni", "avx512_vnni", "asimddp")
PACKAGES = ("mtpbuild", "onnxruntime", "onnxruntime-gpu", "numpy")


def describe_machine(threads: int | None) -> dict[str, Any]:
    """Describe this machine.

    threads: the user's number; None lets the target choose.
    """
    found = {name: next(iter(distributions(name=name)), None) for name in PACKAGES}
    flags = set(read_or_empty(SYSTEM / "proc/cpuinfo").split())
    return {
        "cpu": read_cpu_name(),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "cores": measure_limits().processors,
        "threads": threads,
        "memory_bytes": measure_memory(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: package.version for name, package in found.items() if package},
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def measure_memory() -> int | None:
    """Return the bytes of memory that this process may take; None if the system doesn't say."""
    if (memory := measure_limits().memory) is not None:
        return memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # missing on some systems
        return None


@dataclass(frozen=True)
class Disk:
    """The disk of a folder; `device` tells disks apart, `free` is in bytes."""

    device: int
    free: int


@dataclass(frozen=True)
class Machine:
    """A machine's sizes in bytes; `available` is the memory that programs can still take."""

    memory: int
    available: int
    downloads: Disk
    engines: Disk

    def lacking(self, download: int, engine: int) -> int:
        """Return how many bytes its disks lack for download and engine; 0 if there is room."""
        if self.downloads.device == self.engines.device:
            return max(0, download + engine - self.engines.free)
        return max(0, download - self.downloads.free) + max(0, engine - self.engines.free)


def measure_machine(root: Path = SYSTEM) -> Machine:
    """Measure this machine; raise UsageError on systems without /proc/meminfo."""
    limits = measure_limits(root)
    if limits.memory is None:
        meminfo = root / "proc/meminfo"
        raise UsageError(f"--cpu reads {meminfo}, which this system does not have")
    places = (find_disk(cache_folder()), find_disk(Path.cwd()))
    return Machine(limits.memory, limits.free, *places)


def measure_bandwidth(passes: int = 4) -> float:
    """Measure the bytes a second that all cores together read from memory, in the best pass."""
    import numpy as np

    cores, best = measure_limits().processors, math.inf
    parts = np.array_split(np.ones(READ // 4, np.float32), cores)
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(passes):
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - start)
    return READ / best


def find_disk(folder: Path) -> Disk:
    """Return the disk of a folder, which need not exist yet."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    return Disk(existing.stat().st_dev, shutil.disk_usage(existing).free)


def explain_small_disk(
    place: Path, needed: int, todo: str = "--out names another place"
) -> str | None:
    """Return why the disk of a place can't take so many bytes; None if it can.

    todo: what the user can do.
    """
    if needed <= (free := find_disk(place).free):
        return None
    return (
        f"{format_size(needed)} are to be written, and the disk of {place.resolve()} has "
        f"{format_size(free)} free: {todo}"
    )


@dataclass(frozen=True)
class Room:
    """Functions that measure a machine: the disk of a folder, and the memory in bytes, if known."""

    disk: Callable[[Path], Disk]
    memory: Callable[[], int | None]


THIS_MACHINE = Room(find_disk, measure_memory)
