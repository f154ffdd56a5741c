"""`mtpbuild build --dry-run`: check and size what a build would make; write nothing."""

from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from mtpbuild.builder.compiler.plans import plan_engines
from mtpbuild.builder.plan.plan import Plan, count_state_bytes, make_state_specs
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages
from mtpbuild.runtime.contract.state import CACHED

if TYPE_CHECKING:
    from mtpbuild.builder.compiler.weightless import GraphSize
    from mtpbuild.builder.program.opened_model import OpenedModel


@dataclass(frozen=True)
class EngineForecast:
    """An engine that a build would make; sizes are those of one rank."""

    folder: Path
    plan: Plan
    weight_file_bytes: int
    loaded_weight_bytes: int  # of all programs together
    state_bytes: int  # at run time
    cache_bytes: int  # of the state
    graphs: "dict[str, GraphSize]"  # by program
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
    plans = plan_engines(replace(request, dry_run=True))
    target = plans.target
    with stages("load compiler"), target.importing():
        from mtpbuild.builder.compiler import weightless

        lacking = dict.fromkeys(
            chain.from_iterable(map(target.list_missing, plans.engines.values()))
        )
    with stages("check checkpoint"):
        model = plans.open_model(device="meta")
        # Ranks of one expert group have equal shapes; the first `ep` ranks are in different groups.
        weightless.check_slices(model, plans.ranks[: request.ranks.ep], stages.watch)
    if why := plans.explain_small_disk(model):
        lacking[why] = None
    weight_file_bytes = model.weight_bytes
    loaded = {out: target.count_loaded_weights(model, plan) for out, plan in plans.engines.items()}
    with stages("export"):
        graphs = weightless.export(model, plans.engines.values(), target.trace, stages.watch)
    engines = []
    for (out, plan), sizes in zip(plans.engines.items(), graphs, strict=True):
        specs = make_state_specs(plan)
        engines.append(
            EngineForecast(
                folder=out,
                plan=plan,
                weight_file_bytes=weight_file_bytes,
                loaded_weight_bytes=loaded[out],
                state_bytes=sum(map(count_state_bytes, specs)),
                cache_bytes=sum(count_state_bytes(s) for s in specs if s.role in CACHED),
                graphs=sizes,
                new=plans.is_new(out),
            )
        )
    return DryRun(model, engines, list(lacking))
