"""`mtpbuild build --dry-run`: check and size what a build would make; write nothing."""

from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from mtpbuild.builder.compiler.job import prepare
from mtpbuild.builder.plan.plan import Plan, count_state_bytes, make_state_specs
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages

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
    graphs: "dict[str, StepCounts]"  # program -> counts of its graph
    new: bool  # or a build compares the engine that is there, as hashes are not taken here


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

        missing = map(job.target.list_missing, job.plans.values())
        lacking = dict.fromkeys(chain.from_iterable(missing))
    with stages("check checkpoint"):
        model = job.open_model(device="meta")
        # Ranks of one expert group have equal shapes; the first `ep` ranks are in different groups.
        weightless.check_slices(model, job.ranks[: request.ranks.ep], stages.watch)
    if why := job.explain_small_disk(model):
        lacking[why] = None
    weights = sum(p.numel() * p.element_size() for p in model.model.parameters())
    held = {out: job.target.count_loaded_weights(model, plan) for out, plan in job.plans.items()}
    with stages("export"):
        graphs = weightless.export(model, job.plans.values(), job.target.trace, stages.watch)
    engines = []
    for (out, plan), counts in zip(job.plans.items(), graphs, strict=True):
        specs = make_state_specs(plan)
        state = sum(map(count_state_bytes, specs))
        caches = sum(count_state_bytes(s) for s in specs if s.role == "rows")
        sizes = weights, held[out], state, caches
        engines.append(EngineForecast(out, plan, *sizes, counts, job.is_new(out)))
    return DryRun(model, engines, list(lacking))
