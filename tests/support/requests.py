"""Makes build requests with a target's options and the ranks as plain keywords, as flags do."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder.compiler import build as pipeline
from mtpbuild.builder.compiler import quantize as quantizing
from mtpbuild.builder.compiler.plans import make_plans, plan_engines
from mtpbuild.builder.compiler.source import read_source
from mtpbuild.builder.compiler.workbench import Workbench
from mtpbuild.builder.plan.machine import THIS_MACHINE, Room
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.plan.recipe import FoundModel
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages, Watch, ignore
from mtpbuild.builder.targets import configure_target
from mtpbuild.builder.weights.scheme import build_scheme
from mtpbuild.lab.measure.workbench import WORKBENCH
from mtpbuild.runtime.ranks import Ranks

RANKS = {field.name for field in fields(Ranks)}
OWN = {field.name for field in fields(BuildRequest)}


@contextlib.contextmanager
def noted() -> Iterator[list[BuildRequest]]:
    """Keep the command from building; collect the requests for builds."""
    seen = list[BuildRequest]()

    def build(
        request: BuildRequest, bench: Workbench, stages: Stages
    ) -> list[pipeline.BuiltEngine]:
        seen.append(request)
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "build", build)
        yield seen


def build(request: BuildRequest, stages: Stages | None = None) -> list[pipeline.BuiltEngine]:
    """Build with the instruments that commands bring."""
    return pipeline.build(request, WORKBENCH, stages)


def quantize(request: quantizing.QuantizeRequest, watch: Watch = ignore) -> quantizing.Quantized:
    """Quantise with the instruments that commands bring."""
    return quantizing.quantize(request, WORKBENCH, watch)


def download(request: BuildRequest, room: Room = THIS_MACHINE) -> None:
    """Fetch a model as a build does before it reads the weights."""
    plan_engines(request, may_fetch=True).fetch(room)


def plan_model(request: BuildRequest, model: FoundModel) -> Mapping[Path, Plan]:
    """Plan engines of a model whose folder need have no more than a config.json."""
    target = configure_target(request.target, request.options)
    return make_plans(request, target, read_source(request, model)).engines


def altered(request: BuildRequest, **flags: Any) -> BuildRequest:
    """Return the request with other flags; flags that are not its fields are target options."""
    ranks = {name: value for name, value in flags.items() if name in RANKS}
    if "weights" in flags:
        flags["scheme"] = build_scheme(flags.pop("weights"), flags.pop("head_weights", None))
    own = {name: value for name, value in flags.items() if name in OWN}
    options = {name: value for name, value in flags.items() if name not in RANKS | OWN}
    return replace(
        request,
        ranks=replace(request.ranks, **ranks),
        options={**request.options, **options},
        **own,
    )


def build_request(
    model: object, nextn: tuple[Any, ...] | None = None, **flags: Any
) -> BuildRequest:
    """Make a request for a model, which is a folder or a recipe's name."""
    return altered(BuildRequest(str(model), nextn), **flags)
