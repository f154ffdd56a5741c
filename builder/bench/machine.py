"""Description of the machine, its load and the installed versions, for every measurement."""

import contextlib
import os
import platform
import re
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

PACKAGES = ("mtpbuild", "onnxruntime", "onnxruntime-gpu", "numpy")


def describe_machine(threads: int | None) -> dict[str, Any]:
    """Describe this machine.

    threads: the user's number; None lets the target choose.
    """
    found = {name: next(iter(distributions(name=name)), None) for name in PACKAGES}
    return {
        "cpu": cpu_model(),
        "cores": count_cores(),
        "threads": threads,
        "memory_bytes": physical_memory(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: package.version for name, package in found.items() if package},
        "command": shlex.join(["mtpbuild", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # missing on some systems
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model() -> str:
    """Find the processor's name, in /proc/cpuinfo or by Python's `platform`."""
    with contextlib.suppress(OSError):
        cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if found := re.search(r"^model name\s*:(.*)", cpus, re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()


def physical_memory() -> int | None:
    """Return this machine's memory in bytes; None if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # missing on some systems
        return None
