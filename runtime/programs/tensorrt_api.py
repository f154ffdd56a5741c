"""TensorRT's Python API in its two flavours, and the logger that both want."""

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from mtpbuild.runtime.errors import MissingDependencyError

# By target; the dependency groups have the same names.
MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx_bindings"}


def tensorrt_api(target: str) -> ModuleType:
    """The module, with the library that it binds; raises MissingDependencyError."""
    try:
        return import_module(MODULES[target])
    except ImportError as error:
        raise MissingDependencyError(
            f"target {target} needs {error.name or error}: pip install 'mtpbuild[{target}]'"
        ) from None


@cache
def errors_of(trt: ModuleType) -> Any:
    """The logger, which keeps errors and shows none; the library takes one per process."""

    class Errors(trt.ILogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: object, text: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(text)

        def first(self) -> str:
            """The first error since they were cleared, in one line."""
            return " ".join(self.errors[0].split()) if self.errors else "no reason is given"

    return Errors()
