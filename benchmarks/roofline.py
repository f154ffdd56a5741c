"""Measures how far a step is from the bounds of this machine's memory and arithmetic.

    python benchmarks/roofline.py engines/tiny_n0 engines/tiny_n3 [--tokens 256] [--rounds 5]

For each engine (target onnxruntime, fp32) it shows the median step of one request, measured in turn
with the others, and the sum of its parts' bounds. A part's bound is the longer of its bytes over
the bandwidth and its operations over the rate. Both are measured here, with as many threads: the
bandwidth by reading as many bytes as the whole step, again and again (so the CPU's caches help as
in the step), the rate by a product of matrices of 1,024. Bytes and operations are those of
`mtpbuild plan`, in fp32: weights once per pass, the routed experts that random tokens choose, and
caches as long as in the middle of the request.
"""

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from loop_overhead import PROMPT, measure
from one.machine import least
from rich.console import Console
from rich.table import Table
from script import parse_flags, run

from mtpbuild.builder.forecast.machines import GpuSpec
from mtpbuild.builder.forecast.step import CostModel, StepLoad, StepPart
from mtpbuild.builder.forecast.weights import count_classes, find_layout
from mtpbuild.builder.plan.plan import choose_drafter
from mtpbuild.runtime import Engine
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.ranks import Ranks

FP32 = 4  # bytes


def machine(step_bytes: float) -> GpuSpec:
    """Measure the bandwidth of reading `step_bytes` repeatedly, and the rate of fp32 products."""
    read = torch.ones(int(step_bytes) // FP32)
    one, other = torch.randn(1024, 1024), torch.randn(1024, 1024)
    bandwidth = FP32 * read.numel() / least(read.sum)
    rate = 2 * 1024**3 / least(lambda: one @ other)
    return GpuSpec("this machine", 0.0, bandwidth, {"bf16": rate})


def bound(
    model: str, nextn: int, context: int, measure: Callable[[float], GpuSpec] = machine
) -> tuple[GpuSpec, list[StepPart]]:
    """Return the machine's speeds for this step, and the step's parts."""
    layout = find_layout(model, None)
    found = count_classes(layout, Ranks())
    for one in found:
        one.bytes = one.parameters * FP32
        one.per_rank, one.formats = float(one.bytes), Counter(fp32=one.bytes)
    load = StepLoad(1, context, "float32")
    unknown = GpuSpec("", 0.0, 1.0, {"bf16": 1.0})
    shape = CostModel(layout.config, found, Ranks(), unknown)
    gpu = measure(sum(part.bytes for part in shape.step(nextn, load)))
    return gpu, replace(shape, gpu=gpu).step(nextn, load)


def row(name: str, gpu: GpuSpec, parts: list[StepPart], seconds: float) -> list[str]:
    bound = sum(part.seconds for part in parts)
    slow = max(parts, key=lambda part: part.seconds)
    return [
        name,
        f"{1e3 * seconds:.2f}",
        f"{sum(part.bytes for part in parts) / 1e6:.1f}",
        f"{sum(part.operations for part in parts) / 1e6:.1f}",
        f"{gpu.bandwidth / 1e9:.0f}",
        f"{gpu.peak('bf16') / 1e9:.0f}",
        f"{1e3 * bound:.2f}",
        f"{slow.name} ({slow.limit})",
        f"{seconds / bound:.2f}",
    ]


def check(path: Path, manifest: Manifest, model: str) -> None:
    """Raise UsageError for an engine whose steps this script can't count."""
    if manifest.model.name != model:
        raise UsageError(f"{path} is an engine of {manifest.model.name}, not of --model {model}")
    build, config = manifest.build, find_layout(model, None).config
    usual = choose_drafter(config, build.nextn, None) if build.nextn else build.drafter
    if (build.weights, build.adaptive, build.tp, build.drafter) != ("float32", False, 1, usual):
        raise UsageError(
            f"{path}: expected an fp32 engine of one rank with a fixed nextn and drafter {usual}"
        )


def main() -> None:
    flags = {"tokens": 256, "rounds": 5, "threads": 2}
    arguments = parse_flags(__doc__, "engines", model="deepseek-tiny", **flags)
    torch.set_num_threads(arguments.threads)
    engines = [
        Engine.load(path, threads=arguments.threads, overlap=False, prefix_cache=False)
        for path in arguments.engines
    ]
    for path, engine in zip(arguments.engines, engines, strict=True):
        check(path, engine.manifest, arguments.model)
    steps: list[list[float]] = [[] for _ in engines]
    for i in range(arguments.rounds + 1):
        for engine, seconds in zip(engines, steps, strict=True):
            inside, _, _ = measure(engine, arguments.tokens)
            seconds += inside if i else []  # the first round is the warm-up
    columns = ["engine", "step\nms", "MB", "million\noperations", "GB/s", "Gop/s", "bound\nms"]
    grid = Table(*columns, "largest part", "step over\nbound")
    for path, engine, seconds in zip(arguments.engines, engines, steps, strict=True):
        prompt = len(engine.encode(PROMPT)) if engine.tokenizer else 3
        nextn = engine.manifest.build.nextn
        gpu, parts = bound(arguments.model, nextn, prompt + arguments.tokens // 2)
        grid.add_row(*row(path.name, gpu, parts, statistics.median(seconds)))
        engine.close()
    Console(width=120).print(grid)


if __name__ == "__main__":
    run(main)
