"""The interface of targets; outside of targets/ the builder depends on no target's name."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mtpbuild.builder.graph.style import Attends, GraphStyle
from mtpbuild.runtime.errors import BuildError, MissingDependencyError, explain_missing_package

if TYPE_CHECKING:
    from mtpbuild.builder.plan.plan import Plan
    from mtpbuild.builder.plan.request import BuildRequest
    from mtpbuild.builder.program.opened_model import OpenedModel
    from mtpbuild.builder.program.programs import Program
    from mtpbuild.builder.program.trace import TracedProgram
    from mtpbuild.builder.weights.placed import ByteRange
    from mtpbuild.runtime.contract.manifest import TargetInfo

ONNX_PACKAGES = ("torch", "onnx", "onnxscript", "onnx-ir")


@dataclass(frozen=True)
class Target:
    """A target with the values of its flags; each is a subclass, whose fields are its `flag`s.

    A target's module has an instance with the default values, called TARGET. The command line
    reads the flags of all targets, so the module does not import torch.
    """

    name: ClassVar[str]
    # Packages that build engines; a build's fingerprint includes their versions.
    packages: ClassVar[tuple[str, ...]] = ("torch",)
    uses: ClassVar[tuple[str, ...]] = ()  # folders of other targets whose code makes engines here
    formats: ClassVar[tuple[str, ...]] = ()  # the quantised formats that engines keep
    may_be_exact: ClassVar[bool] = False  # --exact is possible: results by tokens and weights alone
    several_ranks: ClassVar[bool] = False  # it builds with --tp, --ep, --attention-dp
    gpu_attention: ClassVar[tuple[Attends, ...]] = ()  # kinds of attention with kernels on GPUs

    def info(self, plan: "Plan") -> "TargetInfo":
        """Return the manifest's record of what the engine needs to run."""
        raise NotImplementedError

    def lower(
        self, traced: "TracedProgram", weights: Mapping[str, "ByteRange"], folder: Path
    ) -> str:
        """Write the program beside the weights file in `folder`; return the file's name."""
        raise NotImplementedError

    @property
    def style(self) -> GraphStyle:
        """The form in which to trace the programs."""
        return GraphStyle()

    def check(self, request: "BuildRequest") -> None:
        """Raise UsageError for invalid flags, or flags that contradict the request."""

    def compute_capabilities(self, request: "BuildRequest") -> tuple[str, ...]:
        """Return the compute capabilities to compile for, such as 9.0; an empty tuple means a CPU.

        Raises UsageError, or BuildError if the target needs a GPU that is not here.
        """
        return ()

    def check_formats(self, formats: Iterable[str | None], plan: "Plan") -> None:
        """Raise BuildError if the plan's GPUs can't compute with weights in these formats."""

    def check_machine(self, plan: "Plan") -> None:
        """Raise BuildError or MissingDependencyError if this machine can't compile the plan."""

    def check_model(self, model: "OpenedModel", plan: "Plan") -> None:
        """Raise UsageError or BuildError for a checked model that no engine here can hold."""

    def list_missing(self, plan: "Plan") -> Iterator[str]:
        """Yield a line for each thing that a build on this machine lacks, for a dry run to list."""
        try:
            self.check_machine(plan)
        except (BuildError, MissingDependencyError) as error:
            yield str(error)

    def importing(self) -> AbstractContextManager[None]:
        """Turn an import error in the block into one line that names the missing package."""
        packages = (name.replace("-", "_") for name in self.packages)
        return explain_missing_package(f"target {self.name}", "build", *packages)

    def trace(self, program: "Program", plan: "Plan") -> "TracedProgram":
        """Export the program as one graph, and run the first passes on it."""
        from mtpbuild.builder.program.trace import trace
        from mtpbuild.builder.targets.passes import dump_graph, run_passes

        traced = trace(program, plan)
        dump_graph(program.name, "trace", traced.exported)
        exported = run_passes(plan.style.pipeline.passes, traced.exported, traced)
        return replace(traced, exported=exported)

    def compiling(self) -> AbstractContextManager[None]:
        """Return a context around the lowering of all programs of an engine."""
        return nullcontext()

    def keeps_weights_file(self, folder: Path, plan: "Plan") -> bool:
        """Return whether the compiled programs in `folder` read the weights file beside them."""
        return not plan.style.embeds_weights

    def count_loaded_weights(self, model: "OpenedModel", plan: "Plan") -> int:
        """Count the bytes of weights that an engine's programs hold together at run time."""
        return model.weight_bytes

    def explain_inexact(self, files: Iterable[Path]) -> str | None:
        """Return why an engine's results may depend on more than tokens and weights, or None."""
        return f"nobody has probed the operators of target {self.name}"
