"""TensorRT's Python API in its two flavours, the logger that both want, and engines' weights."""

from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtpbuild.runtime.contract.manifest import CONSTANTS, SHARED, WEIGHTS
from mtpbuild.runtime.errors import EngineError, MissingDependencyError, install
from mtpbuild.runtime.files import read_json
from mtpbuild.runtime.programs.mapped_weights import mapped

# By target; the dependency groups have the same names.
MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx_bindings"}
BITS = (np.uint8, np.uint16)  # hold values whose type NumPy does not have: quantised, bfloat16


def tensorrt_api(target: str) -> ModuleType:
    """Returns the module, with the library that it binds; raises MissingDependencyError."""
    try:
        return import_module(MODULES[target])
    except ImportError as error:
        raise MissingDependencyError(
            f"target {target} needs {error.name or error}: {install(target)}"
        ) from None


def dtype_name(trt: ModuleType, dtype: Any) -> str:
    """TensorRT's type as a manifest spells it."""
    return "bfloat16" if dtype == trt.bfloat16 else np.dtype(trt.nptype(dtype)).name


@cache
def errors_of(trt: ModuleType) -> Any:
    """Returns the logger, which keeps errors and shows none; the library takes one per process."""

    class Errors(trt.ILogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: object, text: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(text)

        def first(self) -> str:
            """Returns the first error since they were cleared, in one line."""
            return " ".join(self.errors[0].split()) if self.errors else "no reason is given"

    return Errors()


def shared_weights(folder: Path, program: str) -> list[str]:
    """Returns the names of weights that a program is given, as other programs are."""
    path = folder / SHARED.format(program)
    names: list[str] = read_json(path) if path.exists() else []
    return names


def refit(trt: ModuleType, engine: Any, folder: Path, program: str) -> None:
    """Put the weights back into an engine that was compiled without them.

    Raises EngineError if the files are not those that the engine was compiled with.
    """
    path = folder / CONSTANTS.format(program)
    log = errors_of(trt)
    log.errors.clear()
    refitter = trt.Refitter(engine, log)
    own = mapped(folder / WEIGHTS) | mapped(path)  # must live until they are taken
    weights = {name: values.ravel() for name, values in own.items()}
    for name in refitter.get_all_weights():
        given = as_stored(trt, weights.get(name), refitter.get_weights_prototype(name))
        if given is None or not refitter.set_named_weights(name, given):
            raise EngineError(f"{path}: {name} of {program} does not fit; rebuild the engine")
    if not refitter.refit_cuda_engine():
        raise EngineError(f"{path}: TensorRT can't refit {program} ({log.first()}); rebuild it")


def as_stored(trt: ModuleType, values: NDArray[Any] | None, prototype: Any) -> Any:
    """Bits as the type that the engine has them for: quantised values, or bfloat16.

    None: they do not fit.
    """
    if values is None or values.dtype not in BITS:
        return values
    if values.nbytes != prototype.nbytes:
        return None
    return trt.Weights(prototype.dtype, values.ctypes.data, prototype.size)
