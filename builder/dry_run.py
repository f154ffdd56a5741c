"""`mtpbuild build --dry-run`: a build's checks, graphs and sizes; writes nothing."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from mtpbuild.builder import layout
from mtpbuild.builder.build import (
    BuildRequest,
    Stages,
    find_source,
    make_plans,
    make_prints,
    needs,
)
from mtpbuild.builder.checkpoint.generation import generation_ids
from mtpbuild.builder.plan import Plan, state_specs
from mtpbuild.runtime.errors import MissingDependencyError

if TYPE_CHECKING:
    from mtpbuild.builder.targets import Target

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int64": 8, "bool": 1}


@dataclass(frozen=True)
class Foreseen:
    """One engine: bytes of its weights file and of its state at run time; of each rank."""

    folder: Path
    plan: Plan
    weights: int
    state: int
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
    request = replace(request, dry_run=True)
    source, config = find_source(request)
    ids = generation_ids(source.folder, config)
    plans = dict(make_plans(config, request, source.engine))
    prints = make_prints(source, plans, request)
    for out in plans:
        layout.check_place(out, source.name, force=request.force)
        if request.rank is not None:
            layout.check_ranks(out, prints[out], force=request.force)
    with stages("load compiler"), needs("build", "torch", "onnx", "onnxscript"):
        from mtpbuild.builder import model_source, weightless
        from mtpbuild.builder.targets import load_target

        target = load_target(request.target)
        lacking = list(dict.fromkeys(chain.from_iterable(lacks(target, p) for p in plans.values())))
    with stages("check checkpoint"):
        model = model_source.ModelSource(
            source.name,
            source.folder,
            config,
            ids,
            device="meta",
            formats=target.formats,
            layers=request.layers,
            ranks=request.ranks,
            dtype=request.dtype,
        )
        ranks = range(request.tp) if request.rank is None else [request.rank]
        weightless.check_slices(model, ranks[: request.ep])  # ranks of one group have equal parts
    weights = sum(p.numel() * p.element_size() for p in model.model.parameters())
    with stages("export"):
        graphs = weightless.export(model, plans.values())
    return DryRun(
        checkpoint=source.folder,
        files=len(set(model.checkpoint.files.values())),
        tensors=len(model.checkpoint.files),
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
                not layout.lacking(out, prints[out], ranks),
            )
            for (out, plan), exported in zip(plans.items(), graphs, strict=True)
        ],
        lacking=lacking,
    )


def lacks(target: "Target", plan: Plan) -> Iterator[str]:
    """Packages and parts without which the plan can't be built here."""
    if plan.tp > 1 and plan.plugins:
        yield "target tensorrt builds one rank only so far"
    try:
        target.check(plan)
    except MissingDependencyError as error:
        yield str(error)


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
        each = " per rank" if engine.plan.tp > 1 else ""
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
