"""The GPUs that `mtpbuild plan` knows, from their data sheets."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mtpbuild.runtime.checks import check_one_of


@dataclass(frozen=True)
class GpuSpec:
    """A GPU's memory in bytes, bandwidth in bytes/s, dense peaks in operations/s, capability."""

    name: str
    memory: float
    bandwidth: float
    peaks: Mapping[str, float]  # by the weights' format
    capability: str = "9.0"
    ranks: int = 8  # GPUs of one machine, joined by NVLink

    def peak(self, format: str) -> float:
        """Return a format's peak; formats without hardware units are multiplied in bf16."""
        return self.peaks.get(format, self.peaks["bf16"])


GPUS: Mapping[str, GpuSpec] = {
    gpu.name: gpu
    for gpu in (
        GpuSpec("h100", 80e9, 3.35e12, {"bf16": 0.989e15, "fp8": 1.979e15}),
        GpuSpec("h200", 141e9, 4.8e12, {"bf16": 0.989e15, "fp8": 1.979e15}),
        GpuSpec("b200", 180e9, 8e12, {"bf16": 2.25e15, "fp8": 4.5e15, "nvfp4": 9e15}, "10.0"),
    )
}

# A machine of unknown speed, for counting bytes and operations alone.
UNKNOWN = GpuSpec("unknown", 0.0, math.inf, {"bf16": math.inf})


def find_gpu(name: str) -> GpuSpec:
    return GPUS[check_one_of(name, GPUS, "--gpu")]
