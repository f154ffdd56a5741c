"""One file per target, loaded by name: `lower` turns a traced program into the target's files."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol

from mtpbuild.builder.trace import Traced
from mtpbuild.builder.weights_file import Placed
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.manifest import TargetInfo

TARGETS = {
    "onnxruntime": "mtpbuild.builder.targets.onnxruntime",
    "inductor": "mtpbuild.builder.targets.inductor",
}


class Target(Protocol):
    def check(self) -> None:
        """Raise BuildError if this machine can't build for the target."""
        ...

    def lower(self, traced: Traced, weights: Mapping[str, Placed], folder: Path) -> str:
        """Write the program beside the weights file in `folder`; returns the file's name."""
        ...

    def info(self) -> TargetInfo:
        """What the engine needs to run."""
        ...


def load_target(name: str) -> Target:
    if name not in TARGETS:
        raise UsageError(f"unknown target {name!r}; supported: {', '.join(TARGETS)}")
    target: Target = import_module(TARGETS[name]).TARGET
    return target
