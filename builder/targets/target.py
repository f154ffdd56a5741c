"""The interface of targets; outside of targets/ the builder depends on no target's name."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from mtpbuild.builder.graph.style import Attends, GraphStyle
from mtpbuild.runtime.contract.targets import NoOptions
from mtpbuild.runtime.errors import BuildError, MissingDependencyError, explain_missing_package

if TYPE_CHECKING:
    from mtpbuild.builder.checkpoint.config import ModelConfig
    from mtpbuild.builder.plan.plan import Plan
    from mtpbuild.builder.plan.request import BuildRequest
    from mtpbuild.builder.program.opened_model import OpenedModel
    from mtpbuild.builder.program.programs import Program
    from mtpbuild.builder.program.trace import TracedProgram
    from mtpbuild.builder.weights.placed import ByteRange
    from mtpbuild.runtime.contract.manifest import TargetInfo

ONNX_PACKAGES = ("torch", "onnx", "onnxscript", "onnx-ir")


class Lowering(Protocol):
    """The module of a target that compiles; it may import torch."""

    def info(self, plan: "Plan") -> "TargetInfo":
        """Return the manifest's record of what the engine needs to run."""
        ...

    def lower(
        self, traced: "TracedProgram", weights: Mapping[str, "ByteRange"], folder: Path
    ) -> str:
        """Write the program beside the weights file in `folder`; return the file's name."""
        ...


class Target:
    """A target; each is a subclass, and its module has an instance called TARGET.

    The command line reads the options of all targets, so a target's module does not import torch.
    The module that `lowering` names is a `Lowering`.
    """

    name: str
    lowering: str
    Options: type[Any] = NoOptions  # a frozen dataclass; its fields are `flag`s of `build`
    # Packages that build engines; a build's fingerprint includes their versions.
    packages: tuple[str, ...] = ("torch",)
    formats: tuple[str, ...] = ()  # the quantised formats that engines keep
    may_be_exact = False  # whether --exact is possible: results by tokens and weights alone
    several_ranks = False  # whether it builds with --tp, --ep, --attention-dp
    gpu_attention: tuple[Attends, ...] = ()  # the kinds of attention with kernels on GPUs
    ranks_share_programs = True  # whether all ranks run the same lowered program

    def check(self, request: "BuildRequest", options: Any) -> None:
        """Raise UsageError for invalid options, or options that contradict the request."""

    def compute_capabilities(self, request: "BuildRequest", options: Any) -> tuple[str, ...]:
        """Return the compute capabilities to compile for, such as 9.0; an empty tuple means a CPU.

        Raises UsageError, or BuildError if the target needs a GPU that is not here.
        """
        return ()

    def check_formats(self, formats: Iterable[str | None], plan: "Plan") -> None:
        """Raise BuildError if the plan's GPUs can't compute with weights in these formats."""

    def style(self, options: Any, config: "ModelConfig") -> GraphStyle:
        """Return the form in which to trace the programs."""
        return GraphStyle()

    def embeds_weights(self, options: Any) -> bool:
        """Return whether programs contain their weights, so the engine needs no weights file."""
        return False

    def keeps_weights(self, folder: Path, options: Any) -> bool:
        """Return whether the engine in `folder` needs its weights file."""
        return not self.embeds_weights(options)

    def held_bytes(self, model: "OpenedModel", plan: "Plan") -> int:
        """Count the bytes of weights that an engine's programs hold together at run time."""
        return sum(p.numel() * p.element_size() for p in model.model.parameters())

    def check_machine(self, plan: "Plan") -> None:
        """Raise BuildError or MissingDependencyError if this machine can't compile the plan."""
        self.load_lowering()

    def inexact(self, files: Iterable[Path]) -> str | None:
        """Return why an engine's results may depend on more than tokens and weights, or None."""
        return f"nobody has probed the operators of target {self.name}"

    def check_model(self, model: "OpenedModel", plan: "Plan") -> None:
        """Raise UsageError or BuildError for a checked model that no engine here can hold."""

    def importing(self) -> AbstractContextManager[None]:
        """Turn an import error in the block into one line that names the missing package."""
        packages = (name.replace("-", "_") for name in self.packages)
        return explain_missing_package(f"target {self.name}", "build", *packages)

    def lacks(self, plan: "Plan") -> Iterator[str]:
        """Yield a line for each thing that a build on this machine lacks, for a dry run to list."""
        try:
            self.check_machine(plan)
        except (BuildError, MissingDependencyError) as error:
            yield str(error)

    def trace(self, program: "Program", plan: "Plan") -> "TracedProgram":
        """Export the program as one graph, and run the first passes on it."""
        from mtpbuild.builder.program.trace import trace
        from mtpbuild.builder.targets.passes import dump_graph, run_passes

        traced = trace(program, plan)
        dump_graph(program.name, "trace", traced.exported)
        exported = run_passes(plan.style.pipeline.passes, traced.exported, traced)
        return replace(traced, exported=exported)

    def lower(
        self, traced: "TracedProgram", weights: Mapping[str, "ByteRange"], folder: Path
    ) -> str:
        """Write the program beside the weights file in `folder`; return the file's name."""
        return self.load_lowering().lower(traced, weights, folder)

    def compiling(self) -> AbstractContextManager[None]:
        """Return a context around the lowering of all programs of an engine."""
        return nullcontext()

    def info(self, plan: "Plan") -> "TargetInfo":
        """Return the manifest's record of what the engine needs to run."""
        return self.load_lowering().info(plan)

    def load_lowering(self) -> Lowering:
        """Import the module that compiles."""
        return cast(Lowering, import_module(self.lowering))
