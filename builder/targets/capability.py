"""Compute capabilities as users write them, and data of GPUs for builds without a GPU."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

# The least compute capability for which TensorRT compiles a number format: Ada has the first units
# for fp8, Blackwell those for nvfp4. Kernels of ours, as target inductor has them, decode both.
TENSORRT_FORMATS = {"fp8": "8.9", "nvfp4": "10.0"}


ASSUMED = "10.0"  # of a dry run without a GPU; graphs and sizes do not depend on it


def dotted(text: str) -> str:
    """Turn sm120 into 12.0; return other text stripped, but unchanged."""
    name = re.fullmatch(r"sm_?(\d+)(\d)", text.strip().lower())
    return f"{name[1]}.{name[2]}" if name else text.strip()


def architecture(capability: str) -> int:
    """Turn 9.0 into 90, the number in sm_90."""
    return int(capability.replace(".", ""))


def explain_capability(formats: Iterable[str | None], capabilities: Iterable[str]) -> str | None:
    """Return why TensorRT can't compile one of the formats for one of the GPUs, or None."""
    for format, capability in product(formats, [*capabilities]):
        least = TENSORRT_FORMATS.get(format or "", "0.0")
        if architecture(capability) < architecture(least):
            needs = f"{format} needs compute capability {least} or later in TensorRT"
            return f"{needs}, and the GPU has {capability}"
    return None


@dataclass(frozen=True)
class CudaGpu:
    """The properties of a GPU that AOTInductor, Triton and our kernels read; sizes in bytes."""

    name: str
    multiprocessors: int
    block_shared: int  # shared memory that one block may ask for
    shared: int  # of a multiprocessor
    threads: int  # of a multiprocessor at once
    cache: int  # L2
    memory: int
    registers: int = 1 << 16  # of a multiprocessor

    def __str__(self) -> str:
        kilobytes = self.block_shared >> 10
        return f"{self.name} ({self.multiprocessors} multiprocessors, {kilobytes} KB per block)"


# By compute capability, from NVIDIA's tuning guides and data sheets. The capability determines the
# instructions. GPUs of one capability differ in the number of multiprocessors, which determines
# how work is split.
GPUS = {
    "8.0": CudaGpu("A100", 108, 163 << 10, 164 << 10, 2048, 40 << 20, 80 << 30),
    "9.0": CudaGpu("H200", 132, 227 << 10, 228 << 10, 2048, 50 << 20, 141 << 30),
    "10.0": CudaGpu("B200", 148, 227 << 10, 228 << 10, 2048, 126 << 20, 180 << 30),
    "12.0": CudaGpu("RTX PRO 6000", 188, 99 << 10, 100 << 10, 1536, 128 << 20, 96 << 30),
}
