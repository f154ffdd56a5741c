"""The engine of a model that `mtpbuild run MODEL` names: one that is here, or one built now."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mtpbuild.builder.cli.build import run_build
from mtpbuild.runtime.checks import did_you_mean
from mtpbuild.runtime.cli.commands import confirm
from mtpbuild.runtime.contract.rules import find_rule, list_rules_of
from mtpbuild.runtime.errors import UnknownRecipeError, UsageError

if TYPE_CHECKING:
    from mtpbuild.lab.forecast.cpu import CpuEngine, CpuForecast


def make_engine(model: str, yes: bool, rules: tuple[str, ...] = ()) -> Path:
    """Return the folder of a model's engine; build one after a question, which `yes` answers.

    Of the engines under engines/ that have the acceptance rules the last used one is taken. Raises
    the errors of a build, and BuildError if no engine of the model fits this machine.
    """
    from mtpbuild.builder.compiler.source import fetch_configuration
    from mtpbuild.builder.plan.recipe import name_model
    from mtpbuild.builder.plan.request import BuildRequest
    from mtpbuild.builder.weights.scheme import build_scheme
    from mtpbuild.lab.forecast.cpu import forecast_cpu
    from mtpbuild.lab.forecast.fitting import choose_weights, names_target
    from mtpbuild.lab.forecast.forecast import ForecastRequest
    from mtpbuild.runtime.cli.engines import ENGINES, describe_engine, list_folders
    from mtpbuild.runtime.contract.manifest import read_manifest

    try:
        named = name_model(model)
    except UnknownRecipeError:
        engines = [str(folder.relative_to(ENGINES)) for folder in list_folders()]
        if near := did_you_mean(model, engines):
            raise UsageError(f"{model}: neither an engine nor a model{near}") from None
        raise
    name = named.name
    for rule in rules:
        find_rule(rule)
    here = [
        engine
        for engine in map(describe_engine, list_folders())
        if engine.model == name
        and {*rules} <= {*list_rules_of(read_manifest(ENGINES / engine.name))}
    ]
    if here:
        last = ENGINES / max(here, key=lambda engine: engine.last_use or 0).name
        typer.echo(f"{name}: {last}", err=True)
        return last
    if names_target(named.recipe):
        raise UsageError(f"{name} has no engine here: `mtpbuild build --model {name}` makes one")
    folder = fetch_configuration(model)
    request = ForecastRequest(model, (), checkpoint=folder, bandwidth=1.0)  # it is not shown
    forecast = forecast_cpu(request)
    engine = choose_weights(forecast)
    typer.echo(describe_build(forecast, engine), err=True)
    if not confirm("Go on?", yes=yes):
        raise typer.Exit
    nextn = None if forecast.model.config.num_nextn_predict_layers else (0,)
    with contextlib.redirect_stdout(sys.stderr):  # standard output is the answer's
        scheme = build_scheme(engine.weights)
        (built,) = run_build(BuildRequest(model, nextn, scheme=scheme, acceptance_rules=rules), ())
    return built.folder


def describe_build(forecast: "CpuForecast", engine: "CpuEngine") -> str:
    """Say in a line what is fetched and built."""
    from mtpbuild.runtime.files import format_size

    download = format_size(forecast.download) if forecast.download else "nothing"
    weights = "as stored" if engine.weights is None else f"in {engine.weights}"
    return (
        f"{forecast.name} has no engine here. It fetches {download}, and builds one of "
        f"{format_size(engine.bytes)} in {Path('engines').absolute()}, weights {weights}, context "
        f"{engine.context:,}."
    )
