"""Measures the speeds that bound every step here: reading memory and multiplying matrices."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mtpbuild.lab.measure.host import describe_machine

# Bytes that are read repeatedly: as in a step, some of them are in the CPU's caches.
SIZES = (10**7, 3 * 10**7, 10**8, 3 * 10**8, 10**9, 2 * 10**9)
SIDE = 1024  # side of the matrices
SECONDS = 1.0  # duration of each measurement


@dataclass(frozen=True)
class Machine:
    """Bytes per second by size of the data read, and operations per second of products."""

    reading: tuple[tuple[float, float], ...]
    fp32: float
    int8: float

    def bandwidth(self, size: float) -> float:
        """Return the bytes per second of reading `size` bytes repeatedly."""
        sizes, speeds = zip(*self.reading, strict=True)
        return float(np.interp(math.log(max(size, 1)), np.log(sizes), speeds))

    def rate(self, weights: str) -> float:
        return self.fp32 if weights == "fp32" else self.int8


def machine_of(figures: dict[str, Any]) -> Machine:
    """Return a Machine of the figures of `measure_machine`, as stored in JSON."""
    reading = tuple((size, speed) for size, speed in figures["reading"])
    return Machine(reading, figures["fp32"], figures["int8"])


def measure_machine(threads: int) -> dict[str, Any]:
    """Measure a Machine's figures; return them and a description."""
    torch.set_num_threads(threads)
    reading = []
    for size in SIZES:
        held = torch.ones(size // 4)
        reading.append((size, size / least(held.sum)))
    one, other = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    few, more = (torch.randint(-128, 128, (SIDE, SIDE), dtype=torch.int8) for _ in range(2))
    fp32 = 2 * SIDE**3 / least(lambda: one @ other)
    int8 = 2 * SIDE**3 / least(lambda: torch._int_mm(few, more))
    # torch's product is slow without VNNI; vpmaddubsw multiplies four times as many numbers as fma.
    figures = {"reading": reading, "fp32": fp32, "int8": max(int8, 4 * fp32)}
    return {"figures": figures, "about": describe_machine(threads)}


def least(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest call: other processes' load must not change a bound."""
    work()
    found, end = math.inf, time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        work()
        found = min(found, time.perf_counter() - start)
    return found
