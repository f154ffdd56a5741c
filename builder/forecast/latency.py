"""The latency of a step: time beyond memory and arithmetic, fitted to two measurements.

step = base + per_draft * nextn + roofline. At batch 1 the first two are most of it: launches,
synchronisation and the all-reduces of 61 layers.
"""

import re
from dataclasses import dataclass

from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.ranks import Ranks

# TensorRT-LLM's blog 1: 8 B200, batch 1, 1K tokens in and 2K out, so 2,048 cached on average.
PUBLISHED = ("deepseek-r1-fp4", "b200", Ranks(tp=8), 1, 2048)
PUBLISHED_ACCEPTANCE = (1.00, 1.92, 2.58, 2.82, 2.99, 3.01)  # nextn 0..5
PUBLISHED_SPEED = (111.0, 198.0, 250.0, 253.0, 245.0, 239.0)  # tokens/s of one user


@dataclass(frozen=True)
class Latency:
    """The constant seconds of each step, and of each of its drafts."""

    base: float
    per_draft: float
    source: str

    def seconds(self, nextn: int) -> float:
        return self.base + self.per_draft * nextn


def fit_latency(points: list[tuple[int, float, float]], source: str) -> Latency:
    """Fit two points: (nextn, measured seconds of a step, roofline seconds of its parts)."""
    (n0, step0, parts0), (n1, step1, parts1) = points
    rest0, rest1 = step0 - parts0, step1 - parts1
    per_draft = (rest1 - rest0) / (n1 - n0)
    base = rest0 - per_draft * n0
    if base < 0:
        raise UsageError(
            f"--calibrate: these speeds are beyond the machine's memory and arithmetic "
            f"(nextn {n0}: {1e3 * step0:.2f} ms measured, {1e3 * parts0:.2f} ms at least)"
        )
    return Latency(base, per_draft, source)


def parse_measured(text: str) -> dict[int, float]:
    """Parse `0=111,1=198`: tokens/s of one user at two nextn."""
    found = re.fullmatch(r"(\d+)=(\d+\.?\d*),(\d+)=(\d+\.?\d*)", text.replace(" ", ""))
    speeds = {int(found[i]): float(found[i + 1]) for i in (1, 3)} if found else {}
    if len(speeds) < 2 or 0 in speeds.values():
        example = "tokens/s at two different nextn, such as 0=111,1=198"
        raise UsageError(f"--calibrate {text!r}: give {example}")
    return speeds
