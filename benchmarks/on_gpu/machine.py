"""Measurement of a GPU's bandwidth and rate, timing of calls on it, and the table's rows."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]
COLD = 256 << 20  # bytes that pass through a GPU's cache before operands are reused


@dataclass(frozen=True)
class Machine:
    """A GPU's measured speeds; zeros where nothing is timed."""

    device: str
    bandwidth: float = 0.0  # bytes per second, read and written, of a kernel that negates 1 GiB
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
    data = torch.ones(1 << 28, dtype=torch.float32, device="cuda")
    other = torch.empty_like(data)
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    # A copy in a graph is no kernel: on an H200 it gets 2.75 TB/s.
    moving = microseconds([lambda: torch.neg(data, out=other)]) / 1e6
    multiplying = microseconds([lambda: square @ square]) / 1e6
    return Machine("cuda", 2 * data.nbytes / moving, 2 * 8192**3 / multiplying)


def microseconds(calls: Sequence[Call]) -> float:
    """Return the microseconds per call, from the median of 7 runs of one CUDA graph.

    A run replays it for at least 2 ms, as the launch of a graph takes time, too. The first runs
    raise the GPU's clocks.
    """
    for call in calls:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def run(replays: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / replays

    run(1)
    replays = 1 + int(2000 / run(3))
    run(10 * replays)
    return statistics.median(run(replays) for _ in range(7)) / len(calls)


def repeats(nbytes: int) -> int:
    """Return the number of operand sets for which each has left the cache before its next use."""
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
