"""Makes build requests with a target's options and the ranks as plain keywords, as flags do."""

import contextlib
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from mtpbuild.builder.compiler import build as pipeline
from mtpbuild.builder.compiler import download
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages
from mtpbuild.builder.weights.scheme import build_scheme
from mtpbuild.runtime.ranks import Ranks

RANKS = {field.name for field in fields(Ranks)}
OWN = {field.name for field in fields(BuildRequest)}


@contextlib.contextmanager
def noted() -> Iterator[list[BuildRequest]]:
    """Keep the command from downloading and building; collect the requests for builds."""
    seen = list[BuildRequest]()

    def build(request: BuildRequest, stages: Stages) -> list[pipeline.BuiltEngine]:
        seen.append(request)
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "build", build)
        patch.setattr(download, "download", lambda request: None)
        yield seen


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
