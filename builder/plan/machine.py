"""This machine's memory and disks, and what fits."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mtpbuild.builder.checkpoint.hub_cache import cache_folder
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.files import format_size
from mtpbuild.runtime.limits import SYSTEM, measure_limits


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
        raise UsageError(
            f"memory is read from {meminfo}, which this system lacks: run this on Linux"
        )
    places = (find_disk(cache_folder()), find_disk(Path.cwd()))
    return Machine(limits.memory, limits.free, *places)


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
