"""`mtpbuild build --dry-run`: a build's checks, graphs and sizes; writes nothing."""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from pathlib import Path

from mtpbuild.builder import layout
from mtpbuild.builder.checks import needs
from mtpbuild.builder.plan import Plan, state_specs
from mtpbuild.builder.prepare import prepare
from mtpbuild.builder.request import BuildRequest
from mtpbuild.builder.stages import Stages

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int64": 8, "bool": 1}


@dataclass(frozen=True)
class Foreseen:
    """One engine that a build would make; bytes are those of each rank."""

    folder: Path
    plan: Plan
    weights: int  # bytes of the weights file
    state: int  # bytes of the state at run time
    graphs: dict[str, int]  # program -> nodes
    unchanged: bool


@dataclass(frozen=True)
class DryRun:
    """A checkpoint that was checked, and the engines that a build would make of it."""

    checkpoint: Path
    files: int
    tensors: int
    dequantised: Counter[str]  # weights, by format
    weights_type: str
    dtype: str  # of what is not quantised
    parameters: int
    engines: list[Foreseen]
    lacking: list[str]  # for a build on this machine


def dry_run(request: BuildRequest, stages: Stages) -> DryRun:
    """Raises what `build` would before it writes, but for what only this machine lacks."""
    job = prepare(replace(request, dry_run=True))
    with stages("load compiler"), needs("build", "torch", "onnx", "onnxscript"):
        from mtpbuild.builder import weightless

        lacking = list(
            dict.fromkeys(chain.from_iterable(map(job.target.lacks, job.plans.values())))
        )
    with stages("check checkpoint"):
        model = job.open_model(device="meta")
        # Ranks of one group have equal parts.
        weightless.check_slices(model, job.ranks[: request.ranks.ep])
    weights = sum(p.numel() * p.element_size() for p in model.model.parameters())
    with stages("export"):
        graphs = weightless.export(model, job.plans.values(), job.target.trace)
    return DryRun(
        checkpoint=job.source.folder,
        files=len({stored.file for stored in model.checkpoint.tensors.values()}),
        tensors=len(model.checkpoint.tensors),
        dequantised=model.dequantised(),
        weights_type=model.weights_type,
        dtype=model.dtype,
        parameters=model.parameters,
        engines=[
            Foreseen(
                out,
                plan,
                weights,
                sum(ITEM_BYTES[s.dtype] * prod(s.shape) for s in state_specs(plan)),
                exported,
                not layout.lacking(out, job.fingerprints[out], job.ranks),
            )
            for (out, plan), exported in zip(job.plans.items(), graphs, strict=True)
        ],
        lacking=lacking,
    )


def print_dry_run(done: DryRun) -> None:
    """What was read, then a line per engine."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{done.checkpoint}: {done.tensors:,} tensors in {done.files} files, as config.json "
        f"demands; {done.parameters:,} parameters"
    )
    if done.dequantised:
        counts = sorted(done.dequantised.items())
        found = ", ".join(f"{count:,} in {name}" for name, count in counts)
        console.print(f"{found} would be dequantised to {done.dtype}")
    table = Table("engine", "nextn", "drafter", "weights", "state", "build")
    for engine in done.engines:
        each = " per rank" if engine.plan.ranks.tp > 1 else ""
        table.add_row(
            str(engine.folder),
            f"0 to {engine.plan.nextn}" if engine.plan.adaptive else str(engine.plan.nextn),
            engine.plan.drafter or "-",
            f"{engine.weights / 1e9:,.2f} GB {done.weights_type}{each}",
            f"{engine.state / 1e9:,.3f} GB{each}",
            "nothing to do" if engine.unchanged else "to do",
        )
    console.print(table)
    for engine in done.engines:
        sizes = ", ".join(f"{name} {nodes:,} nodes" for name, nodes in engine.graphs.items())
        console.print(f"{engine.folder}: exported without weights: {sizes}")
    for line in done.lacking:
        console.print(f"can't be built here: {line}", markup=False)  # [group] of packages
    console.print("dry run: nothing was written")
