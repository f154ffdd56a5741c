"""Replaces parts of a builder's target, and keeps it in the registry while a test needs it."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from torch.export import ExportedProgram
from torch.fx import Graph

from mtpbuild.builder.overrides import override_attribute
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.program.programs import Program
from mtpbuild.builder.program.trace import TracedProgram
from mtpbuild.builder.targets import load_target
from mtpbuild.builder.targets.target import Target
from mtpbuild.lab.measure import workbench
from mtpbuild.runtime.contract.manifest import TensorSpec, read_manifest
from mtpbuild.runtime.contract.programs import MIXED
from tests.support.registry import registered


def no_trace(program: Program, plan: Plan) -> TracedProgram:
    """Stand in for torch.export: the graph is empty, and the only inputs are the arguments."""
    exported = cast(ExportedProgram, SimpleNamespace(graph=Graph(), range_constraints={}))
    inputs = tuple(
        TensorSpec.model_validate(
            {"name": name, "dtype": str(given.dtype).removeprefix("torch."), "shape": given.shape}
        )
        for name, given in program.arguments.items()
    )
    return TracedProgram(program.name, exported, inputs, (), plan)


def two_bytes(traced: TracedProgram, weights: Any, folder: Path) -> str:
    """Stand in for a target's compiler: the program is a file of two bytes."""
    (folder / f"{traced.name}.onnx").write_bytes(b"\x08\x0a")
    return f"{traced.name}.onnx"


def fake_target(real: Target, **replaced: Any) -> Target:
    """Make a target like the real one, except for some methods, given without `self`, and values.

    It has the real one's module, as fingerprints have the code of that.
    """
    members = {key: staticmethod(v) if callable(v) else v for key, v in replaced.items()}
    members["__module__"] = type(real).__module__
    fake: Target = type("FakeTarget", (type(real),), members)()
    return fake


@contextlib.contextmanager
def in_place_of(name: str, **replaced: Any) -> Iterator[None]:
    """Put into the registry a target like the one of that name, except for some methods."""
    with registered(name, builder=fake_target(load_target(name), **replaced)):
        yield


@contextlib.contextmanager
def quick_target(name: str, **replaced: Any) -> Iterator[None]:
    """Put a target in place whose programs are neither traced nor compiled, nor timed.

    A build takes milliseconds, and everything around the compiler is real.
    """
    methods: dict[str, Any] = {"trace": no_trace, "lower": two_bytes}
    methods["explain_inexact"] = lambda files: "its graphs are two bytes"
    untimed = override_attribute(workbench, "time_steps", lambda folder, manifest: None)
    with in_place_of(name, **methods | replaced), untimed:
        yield


def greedy_only() -> contextlib.AbstractContextManager[None]:
    """Put a target onnxruntime in place that leaves out the step that samples.

    That step is half of a small build. An engine runs it only for requests that need it.
    """
    real = load_target("onnxruntime")

    def trace(program: Program, plan: Plan) -> TracedProgram:
        return (no_trace if program.name.startswith(MIXED) else real.trace)(program, plan)

    def lower(traced: TracedProgram, weights: Any, folder: Path) -> str:
        lower_one = two_bytes if traced.name.startswith(MIXED) else real.lower
        return lower_one(traced, weights, folder)

    return quick_target("onnxruntime", trace=trace, lower=lower)


def all_but_mixed_of(engine: Path) -> contextlib.AbstractContextManager[None]:
    """Put a target onnxruntime in place that compiles the step that samples alone.

    The other programs are those of an engine that differs in acceptance rules, which they lack.
    """
    real, built = load_target("onnxruntime"), read_manifest(engine).programs

    def trace(program: Program, plan: Plan) -> TracedProgram:
        if program.name.startswith(MIXED):
            return real.trace(program, plan)
        spec = built[program.name]
        return replace(no_trace(program, plan), inputs=spec.inputs, outputs=spec.outputs)

    def lower(traced: TracedProgram, weights: Any, folder: Path) -> str:
        if traced.name.startswith(MIXED):
            return real.lower(traced, weights, folder)
        return Path(shutil.copy(engine / built[traced.name].file, folder)).name

    return in_place_of("onnxruntime", trace=trace, lower=lower)
