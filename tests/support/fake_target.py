"""A target of the builder with parts replaced, in the registry as long as a test wants it."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from torch.export import ExportedProgram
from torch.fx import Graph

from mtpbuild.builder.plan import Plan
from mtpbuild.builder.program.programs import Program
from mtpbuild.builder.program.trace import Traced
from mtpbuild.builder.targets import load_target
from mtpbuild.builder.targets.target import Target
from tests.support.registry import registered


def no_trace(program: Program, plan: Plan) -> Traced:
    """Stand in for torch.export: the graph is empty, and nothing is traced."""
    exported = cast(ExportedProgram, SimpleNamespace(graph=Graph()))
    return Traced(program.name, exported, (), (), plan)


def two_bytes(traced: Traced, weights: Any, folder: Path) -> str:
    """Stand in for a target's compiler: the program is a file of two bytes."""
    (folder / f"{traced.name}.onnx").write_bytes(b"\x08\x0a")
    return f"{traced.name}.onnx"


def fake_target(real: Target, **replaced: Callable[..., Any]) -> Target:
    """Make a target like the real one, but for some of its methods, given without `self`."""
    methods = {key: staticmethod(value) for key, value in replaced.items()}
    fake: Target = type("FakeTarget", (type(real),), methods)()
    return fake


@contextlib.contextmanager
def in_place_of(name: str, **replaced: Callable[..., Any]) -> Iterator[None]:
    """Put into the registry a target like the one of that name, but for some of its methods."""
    with registered(name, builder=fake_target(load_target(name), **replaced)):
        yield


def quick_target(
    name: str, **replaced: Callable[..., Any]
) -> contextlib.AbstractContextManager[None]:
    """Put a target in place whose programs are neither traced nor compiled.

    A build takes milliseconds, and all that is around the compiler is real.
    """
    methods: dict[str, Callable[..., Any]] = {"trace": no_trace, "lower": two_bytes}
    return in_place_of(name, **methods | replaced)
