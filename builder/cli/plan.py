"""The command `plan`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from mtpbuild.builder.cli.shared import parse_range, print_result
from mtpbuild.builder.flags import PlanFlags, RankFlags
from mtpbuild.runtime.checks import parse_list
from mtpbuild.runtime.cli.commands import error_line
from mtpbuild.runtime.configuration.settings import join, read_requested_ranks
from mtpbuild.runtime.errors import MissingDependencyError, UsageError
from mtpbuild.runtime.flag_groups import (
    drafts_flag,
    find_given_flags,
    flag,
    group_flags,
    name_flag,
    output_flag,
)

FOR_GPUS = (  # parameters that mean nothing with --cpu
    *("gpu", "tp", "ep", "attention_dp", "prefill_chunk"),
    *("measured", "picture"),
)


@error_line
@group_flags
def plan(
    context: typer.Context,
    model: Annotated[
        str, Option(help="Recipe name (needs no weights), checkpoint, or OWNER/NAME.")
    ],
    *,
    cpu: bool = flag(False, "For the CPU here: download, disk, memory, bytes that a step reads."),
    measured: str | None = flag(None, "Your tokens/s of one user at two nextn: 0=111,1=198."),
    nextn: str | None = drafts_flag(
        None, "Draft tokens per step: a number, 0,1,3 or 0..5. Default: 0..5, or 0 without modules."
    ),
    acceptance: str | None = drafts_flag(
        None, "Acceptance length for each nextn: 1,1.92. Default: R1's."
    ),
    flags: PlanFlags,
    ranks: RankFlags,
    picture: Path | None = output_flag(None, "Write the figures as a PNG too."),
    json: bool = output_flag(False, "As one JSON object."),
) -> None:
    """Predict sizes, step times and speed of a model on GPUs that need not be here.

    With --cpu: what it needs of this machine.
    """
    refuse_other_flags(context, cpu, flags)
    from mtpbuild.builder.compiler.source import fetch_configuration
    from mtpbuild.lab.forecast.cpu import forecast_cpu, make_cpu_plan_json, print_cpu_forecast
    from mtpbuild.lab.forecast.forecast import ForecastRequest, forecast, parse_measured
    from mtpbuild.lab.forecast.report import draw_forecast, make_plan_json, print_forecast
    from mtpbuild.lab.show.pictures import explain_no_pictures

    if picture is not None and (why := explain_no_pictures()):
        raise MissingDependencyError(why)
    lengths = None
    if acceptance is not None:
        lengths = parse_list("--acceptance", acceptance, float, "1,1.92,2.58")
    if flags.checkpoint is None and (folder := fetch_configuration(model)) is not None:
        flags = replace(flags, checkpoint=folder)
    request = ForecastRequest(
        model=model,
        nextn=() if nextn is None else parse_range(nextn),
        ranks=read_requested_ranks(join(ranks.settings())),
        acceptance=lengths,
        measured=None if measured is None else parse_measured(measured),
        **vars(flags),
    )
    if cpu:
        local = forecast_cpu(request)
        print_result(json, make_cpu_plan_json(local), lambda: print_cpu_forecast(local))
        return
    done = forecast(request)
    if picture is not None:
        draw_forecast(done, picture)
    print_result(json, make_plan_json(done), lambda: print_forecast(done))


def refuse_other_flags(context: typer.Context, cpu: bool, flags: PlanFlags) -> None:
    """Raise UsageError for flags of plans for GPUs with --cpu, or of those for CPUs without."""
    if not cpu and flags.bandwidth is not None:
        raise UsageError("--bandwidth goes with --cpu: a GPU's is the data sheet's")
    if not cpu and flags.memory is not None:
        raise UsageError("--memory goes with --cpu: a GPU's is the data sheet's")
    if flags.memory is None and find_given_flags(context, ("disk_bandwidth",)):
        raise UsageError("--disk-bandwidth goes with --memory")
    if cpu and (typed := find_given_flags(context, FOR_GPUS)):
        names = ", ".join(map(name_flag, typed))
        raise UsageError(f"--cpu does not go with {names}: they are for plans of GPUs")
