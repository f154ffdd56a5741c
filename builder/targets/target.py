"""The compiler's interface to a target; nothing else in the builder knows a target by its name."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpbuild.builder.checks import needs
from mtpbuild.builder.targets.style import Attends, GraphStyle
from mtpbuild.runtime.errors import MissingDependencyError
from mtpbuild.runtime.targets import NoOptions

if TYPE_CHECKING:
    from mtpbuild.builder.models.config import ModelConfig
    from mtpbuild.builder.opened_model import OpenedModel
    from mtpbuild.builder.plan import Plan
    from mtpbuild.builder.program.programs import Program
    from mtpbuild.builder.program.trace import Traced
    from mtpbuild.builder.request import BuildRequest
    from mtpbuild.builder.weights.placed import Placed
    from mtpbuild.runtime.contract.manifest import TargetInfo

ONNX_PACKAGES = ("torch", "onnx", "onnxscript", "onnx-ir")


class Target:
    """A target is a subclass, and its module has an instance called TARGET.

    The command line reads the options of all targets, so that module does not import torch. What
    compiles is in another one, `lowering`, with `lower` and `info`, and `check` where it is needed.
    """

    name: str
    lowering: str
    Options: type[Any] = NoOptions  # a frozen dataclass; its fields are `flag`s of `build`
    packages: tuple[str, ...] = (
        "torch",
    )  # packages that build engines; the fingerprint holds their versions
    formats: tuple[str, ...] = ()  # formats of quantised weights that engines keep
    may_be_exact = False  # whether results of some engines depend on tokens and weights alone
    several_ranks = False  # whether it builds --tp, --ep, --attention-dp
    gpu_attention: tuple[Attends, ...] = ()  # what it has kernels for on GPUs
    ranks_share_programs = True  # whether a program is lowered once for all ranks

    def check(self, request: "BuildRequest", options: Any) -> None:
        """Raise UsageError for options that can't be, or don't go with the rest of the request."""

    def compute_capabilities(self, request: "BuildRequest", options: Any) -> tuple[str, ...]:
        """Returns the capabilities that an engine is compiled for, such as 9.0; none: for a CPU.

        Raises UsageError, or EngineError if it is compiled for a GPU that is not here.
        """
        return ()

    def style(self, options: Any, config: "ModelConfig") -> GraphStyle:
        return GraphStyle()

    def embeds_weights(self, options: Any) -> bool:
        """Tells whether programs hold their weights, so that the engine needs no weights file."""
        return False

    def keeps_weights(self, folder: Path, options: Any) -> bool:
        """Tells whether the engine that stands in `folder` needs its weights file."""
        return not self.embeds_weights(options)

    def held_bytes(self, model: "OpenedModel", options: Any) -> int:
        """Counts the bytes of weights that all programs of an engine hold, when it runs."""
        return sum(p.numel() * p.element_size() for p in model.model.parameters())

    def check_machine(self, plan: "Plan") -> None:
        """Raise BuildError for what the target, or this machine, can't compile."""
        if check := getattr(import_module(self.lowering), "check", None):
            check(plan)

    def inexact(self, files: Iterable[Path]) -> str | None:
        """Says why results of these programs may depend on more than tokens and weights, if so."""
        return f"nobody has probed the operators of target {self.name}"

    def check_model(self, model: "OpenedModel", plan: "Plan") -> None:
        """Raise UsageError for a checked model that engines of this target can't hold."""

    def importing(self) -> AbstractContextManager[None]:
        """Turns an import error in the block into one line that names the missing package."""
        return needs("build", *(name.replace("-", "_") for name in self.packages))

    def lacks(self, plan: "Plan") -> Iterator[str]:
        """Says in lines what this machine lacks to build the plan; a dry run goes on without it."""
        try:
            self.check_machine(plan)
        except MissingDependencyError as error:
            yield str(error)

    def trace(self, program: "Program", plan: "Plan") -> "Traced":
        """Exports the program as one graph."""
        from mtpbuild.builder.program.trace import trace

        return trace(program, plan)

    def lower(self, traced: "Traced", weights: Mapping[str, "Placed"], folder: Path) -> str:
        """Write the program beside the weights file in `folder`; returns the file's name."""
        file: str = import_module(self.lowering).lower(traced, weights, folder)
        return file

    def compiling(self) -> AbstractContextManager[None]:
        """Surrounds the lowering of an engine's programs, which share what is made here."""
        return nullcontext()

    def info(self, plan: "Plan") -> "TargetInfo":
        """Returns the manifest's record of what the engine needs to run."""
        info: TargetInfo = import_module(self.lowering).info(plan)
        return info
