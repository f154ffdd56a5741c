"""One file per target, loaded by name: `lower` turns a traced program into the target's files."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol

from mtpbuild.builder.plan import Plan
from mtpbuild.builder.program.trace import Traced
from mtpbuild.builder.weights_file import Placed
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.manifest import TargetInfo

TARGETS = {
    "onnxruntime": "mtpbuild.builder.targets.onnxruntime",
    "inductor": "mtpbuild.builder.targets.inductor",
    "tensorrt": "mtpbuild.builder.targets.tensorrt",
    "tensorrt-rtx": "mtpbuild.builder.targets.tensorrt_rtx",
}


class Target(Protocol):
    formats: tuple[str, ...]  # of quantised weights that stay as they are
    embeds_weights: bool  # programs hold them: the engine needs no weights file beside

    def check(self, plan: Plan) -> None:
        """Raise BuildError if the plan can't be built for the target, or not on this machine."""
        ...

    def lower(self, traced: Traced, weights: Mapping[str, Placed], folder: Path) -> str:
        """Write the program beside the weights file in `folder`; returns the file's name."""
        ...

    def info(self, plan: Plan) -> TargetInfo:
        """What the engine needs to run."""
        ...


def load_target(name: str) -> Target:
    if name not in TARGETS:
        raise UsageError(f"unknown target {name!r}; supported: {', '.join(TARGETS)}")
    target: Target = import_module(TARGETS[name]).TARGET
    return target
