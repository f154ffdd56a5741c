"""Describe this machine: processor, load, versions; measure its bandwidth."""

import math
import os
import platform
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from mtpbuild.builder.plan.machine import measure_memory
from mtpbuild.runtime.limits import SYSTEM, measure_limits, read_cpu_name, read_or_empty

READ = 1 << 28  # bytes, more than caches hold
# Those that our CPU kernels are compiled for, as Linux names them; processors of one name differ.
INSTRUCTIONS = ("avx2", "avx_vnni", "avx512_vnni", "asimddp")
PACKAGES = ("mtpbuild", "onnxruntime", "onnxruntime-gpu", "numpy", "torch")


def describe_machine(threads: int | None) -> dict[str, Any]:
    """Describe this machine.

    threads: the user's number; None lets the target choose.
    """
    packages = {name: next(iter(distributions(name=name)), None) for name in PACKAGES}
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
        "versions": {name: package.version for name, package in packages.items() if package},
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def measure_bandwidth(passes: int = 4) -> float:
    """Measure the bytes a second that all cores together read from memory, in the best pass."""
    import numpy as np

    cores = measure_limits().processors
    best = math.inf
    parts = np.array_split(np.ones(READ // 4, np.float32), cores)
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(passes):
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - start)
    return READ / best
