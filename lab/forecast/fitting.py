"""The engine that suits a machine's CPU: of one model, and of all recipes."""

from collections.abc import Iterable
from dataclasses import dataclass

from mtpbuild.builder.plan.machine import Machine
from mtpbuild.builder.plan.recipe import Recipe
from mtpbuild.lab.forecast.cpu import CpuEngine, CpuForecast, describe_fit, forecast_cpu
from mtpbuild.lab.forecast.forecast import ForecastRequest
from mtpbuild.runtime.errors import BuildError

SMALL = 10**9  # bytes of an engine that needs no smaller weights
SMALLEST = 0.25  # of a download: int4 engines of weights in bfloat16 take 0.29 of it


@dataclass(frozen=True)
class FittingEngine:
    """A recipe's engine on this machine; tokens_per_s: at most, of one user, with best nextn."""

    forecast: CpuForecast
    engine: CpuEngine

    @property
    def tokens_per_s(self) -> float:
        return max(speed for speed in self.forecast.speeds(self.engine) if speed is not None)


def choose_weights(forecast: CpuForecast) -> CpuEngine:
    """Return the engine to build: with weights as stored if it is small, else in int4.

    Raises BuildError if it does not fit.
    """
    stored, *_, int4 = forecast.engines
    chosen = stored if stored.bytes <= SMALL or stored.bytes <= int4.bytes else int4
    if not chosen.fits:
        lacks = describe_fit(chosen).removeprefix("no, ")
        raise BuildError(
            f"{forecast.name} does not fit this machine, it {lacks}; "
            "`mtpbuild recipes --fits` lists what does"
        )
    return chosen


def names_target(recipe: Recipe | None) -> bool:
    """Return whether a recipe is for another target than the one for CPUs, and names it."""
    return recipe is not None and "target" in recipe.model_fields_set


def find_fitting(
    recipes: Iterable[Recipe], machine: Machine, bandwidth: float
) -> list[FittingEngine]:
    """Return the engines that fit a machine, the fastest first.

    bandwidth: of memory, in bytes/s.
    """
    fitting = list[FittingEngine]()
    for recipe in recipes:
        smallest = SMALLEST * 1e9 * (recipe.download or 0)
        nowhere = recipe.repository is None and not recipe.shipped
        if names_target(recipe) or nowhere or smallest > machine.available:
            continue
        request = ForecastRequest(recipe.name, (), bandwidth=bandwidth / 1e9)
        forecast = forecast_cpu(request, machine)
        try:
            fitting.append(FittingEngine(forecast, choose_weights(forecast)))
        except BuildError:  # it fits in no format
            continue
    return sorted(fitting, key=lambda engine: -engine.tokens_per_s)
