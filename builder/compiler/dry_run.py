"""`mtpbuild build --dry-run`: check and size what a build would make; write nothing."""

from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from mtpbuild.builder.compiler.job import prepare
from mtpbuild.builder.plan.plan import Plan, size_of, state_specs
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages
from mtpbuild.runtime.contract.programs import PLAIN

if TYPE_CHECKING:
    from mtpbuild.builder.compiler.step_counts import StepCounts
    from mtpbuild.builder.program.opened_model import OpenedModel


@dataclass(frozen=True)
class EngineForecast:
    """An engine that a build would make; sizes are those of one rank."""

    folder: Path
    plan: Plan
    weights: int  # bytes of the weights file
    held: int  # bytes of weights that all programs hold together
    state: int  # bytes of the state at run time
    caches: int  # bytes of caches in `state`
    graphs: "dict[str, StepCounts]"  # program -> counts of its graph; empty if the engine exists
    unchanged: bool


@dataclass(frozen=True)
class DryRun:
    """A checked checkpoint, and the engines that a build would make from it."""

    model: "OpenedModel"  # its tensors have shapes but no values
    engines: list[EngineForecast]
    lacking: list[str]  # a line for each thing that this machine lacks to build them


def dry_run(request: BuildRequest, stages: Stages) -> DryRun:
    """Make a build's checks and export its graphs without weights; return the results.

    Raises the errors that `build` would raise before it writes. Things that only this machine lacks
    are listed in `lacking` instead.
    """
    job = prepare(replace(request, dry_run=True))
    with stages("load compiler"), job.target.importing():
        from mtpbuild.builder.compiler import weightless

        lacking = dict.fromkeys(chain.from_iterable(map(job.target.lacks, job.plans.values())))
    with stages("check checkpoint"):
        model = job.open_model(device="meta")
        # Ranks of one expert group have equal shapes; the first `ep` ranks are in different groups.
        weightless.check_slices(model, job.ranks[: request.ranks.ep], stages.watch)
    weights = sum(p.numel() * p.element_size() for p in model.model.parameters())
    held = {out: job.target.held_bytes(model, plan.options) for out, plan in job.plans.items()}
    todo = {out: plan for out, plan in job.plans.items() if job.lacking(out)}
    with stages("export"):
        graphs = weightless.export(model, todo.values(), job.target.trace, stages.watch)
    exported = dict(zip(todo, graphs, strict=True))
    engines = []
    for out, plan in job.plans.items():
        specs = state_specs(plan)
        state = sum(map(size_of, specs))
        caches = sum(size_of(s) for s in specs if s.role == "rows")
        found = exported.get(out, {})
        sizes = weights, held[out], state, caches
        engines.append(EngineForecast(out, plan, *sizes, found, out not in todo))
    return DryRun(model, engines, list(lacking))


def print_dry_run(done: DryRun) -> None:
    """Print what was read, then a line per engine."""
    from rich.markup import escape
    from rich.table import Column, Table

    from mtpbuild.builder.compiler.notes import describe_formats
    from mtpbuild.builder.compiler.step_counts import describe_counts
    from mtpbuild.builder.program.opened_model import count_words
    from mtpbuild.builder.show.tables import format_size, make_names_column, print_lines

    model = done.model
    files = [entry.file for entry in model.stored.tensors.values()]
    print_lines(
        f"{model.source.folder}: {len(files):,} tensors in {len(set(files))} files, as "
        f"config.json demands; {model.table.parameters:,} parameters"
    )
    print_lines(describe_formats(model))
    if (scheme := model.scheme) is not None and scheme.main is not None:
        head = "would stay" if scheme.head is None else f"to {scheme.head}"
        print_lines(f"weights would be quantised to {scheme.main}; embedding and head {head}")
    if model.unfit:
        print_lines(f"{len(model.unfit):,} weights stay as they are: no block fits their columns")
    if counts := count_words(model.dequantised().elements()):
        print_lines(f"{counts} would be dequantised to {model.style.dtype}")
    if counts := count_words(model.rounded().values()):
        print_lines(f"{counts} would be rounded to {model.style.rounds_to}")
    folders = make_names_column("engine", [str(engine.folder) for engine in done.engines])
    drafters = Column("drafter", no_wrap=True)
    table = Table(folders, "nextn", drafters, "weights", "state", "build")
    for engine in done.engines:
        per_rank = " per rank" if engine.plan.ranks.tp > 1 else ""
        table.add_row(
            str(engine.folder),
            f"0 to {engine.plan.nextn}" if engine.plan.adaptive else str(engine.plan.nextn),
            engine.plan.drafter or "-",
            f"{engine.weights / 1e9:,.2f} GB {model.weights_type}{per_rank}",
            f"{engine.state / 1e9:,.3f} GB{per_rank}",
            "nothing to do" if engine.unchanged else "to do",
        )
    print_lines(table, fold=False)
    for engine in done.engines:
        sizes = ", ".join(f"{name} {graph.nodes:,} nodes" for name, graph in engine.graphs.items())
        if sizes:
            print_lines(f"{engine.folder}: exported without weights: {sizes}")
        if step := engine.graphs.get(PLAIN):
            start = f"{engine.folder}: " + ("each rank: " if engine.plan.ranks.tp > 1 else "")
            held = f"weights {format_size(engine.weights)}, caches {format_size(engine.caches)}"
            if engine.held != engine.weights:
                held += f", all programs together hold {format_size(engine.held)} of weights"
            temporary = max(graph.temporary for graph in engine.graphs.values())
            results = f"intermediate results up to {format_size(temporary)}"
            print_lines(f"{start}{held}; a step: {describe_counts(step)}; {results}")
    for line in done.lacking:
        print_lines(f"can't be built here: {escape(line)}")  # [group] of packages
    print_lines("dry run: nothing was written")
