"""Measures a GPU's bandwidth and rate, times calls on it, and holds a row of the table."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]
COLD = 256 << 20  # bytes that pass through a GPU's cache before operands are used again


@dataclass(frozen=True)
class Machine:
    """Holds a GPU's measured speeds; zeros where nothing is timed."""

    device: str
    bandwidth: float = 0.0  # bytes per second, copying 1 GiB
    rate: float = 0.0  # operations per second of a bf16 product of 8,192


@dataclass
class Row:
    kernel: str
    shape: str
    error: float
    microseconds: float | None = None
    bound: float | None = None
    beside: list[str] = field(default_factory=list)  # such as other kernels' times
    limit: float = 5e-2  # for the error


def measure_machine() -> Machine:
    data = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(data)
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    copying = microseconds([lambda: other.copy_(data)]) / 1e6
    multiplying = microseconds([lambda: square @ square]) / 1e6
    return Machine("cuda", 2 * data.numel() / copying, 2 * 8192**3 / multiplying)


def microseconds(calls: Sequence[Call]) -> float:
    """Times calls in one CUDA graph: the median of 7 replays over the number of calls."""
    for call in calls:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times) / len(calls)


def repeats(nbytes: int) -> int:
    """Returns enough sets of operands for each to have left the cache before its next use."""
    return max(2, min(64, COLD // nbytes + 1))


def difference(got: Tensor, wanted: Tensor) -> float:
    return float((got.float().cpu() - wanted.float().cpu()).abs().max())


def cells(row: Row) -> list[str]:
    figures = ["-", "-", "-"]
    if row.microseconds is not None:
        figures[0] = f"{row.microseconds:.1f}"
        if row.bound is not None:
            figures[1:] = f"{row.bound:.1f}", f"{row.bound / row.microseconds:.0%}"
    beside = ", ".join(row.beside) or "-"
    return [row.kernel, row.shape, f"{row.error:.1e}", *figures, beside]
