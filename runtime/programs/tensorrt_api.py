"""TensorRT's Python API in its two flavours, their logger, and the refit of engines' weights."""

from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtpbuild.runtime.contract.manifest import CONSTANTS, SHARED, WEIGHTS
from mtpbuild.runtime.errors import EngineError, explain_missing_package
from mtpbuild.runtime.files import read_json
from mtpbuild.runtime.programs.mapped_weights import map_tensors

# target -> module; the dependency groups are named like the targets.
MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx_bindings"}
BITS = (np.uint8, np.uint16)  # stand for types that NumPy lacks: quantised values, bfloat16


def tensorrt_api(target: str) -> ModuleType:
    """Import the module of a target; raises MissingDependencyError."""
    with explain_missing_package(f"target {target}", target):
        return import_module(MODULES[target])


def name_dtype(trt: ModuleType, dtype: Any) -> str:
    """Return the name of a TensorRT type as manifests spell it."""
    return "bfloat16" if dtype == trt.bfloat16 else np.dtype(trt.nptype(dtype)).name


@cache
def make_error_logger(trt: ModuleType) -> Any:
    """Return a logger that keeps errors and prints nothing; TensorRT takes one per process."""

    class Errors(trt.ILogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: object, text: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(text)

        def first(self) -> str:
            """Return the first error since they were cleared, in one line."""
            return " ".join(self.errors[0].split()) if self.errors else "no reason is given"

    return Errors()


def list_shared_weights(folder: Path, program: str) -> list[str]:
    """Return the names of the shared weights that a program takes as inputs."""
    path = folder / SHARED.format(program)
    names: list[str] = read_json(path) if path.exists() else []
    return names


def refit(trt: ModuleType, engine: Any, folder: Path, program: str) -> None:
    """Put the weights back into an engine that was compiled without them.

    Raises EngineError if the files are not those that the engine was compiled with.
    """
    path = folder / CONSTANTS.format(program)
    log = make_error_logger(trt)
    log.errors.clear()
    refitter = trt.Refitter(engine, log)
    tensors = map_tensors(folder / WEIGHTS) | map_tensors(path)  # must live until the refit
    weights = {name: values.ravel() for name, values in tensors.items()}
    for name in refitter.get_all_weights():
        stored = as_stored(trt, weights.get(name), refitter.get_weights_prototype(name))
        if stored is None or not refitter.set_named_weights(name, stored):
            raise EngineError(f"{path}: {name} of {program} does not fit; rebuild the engine")
    if not refitter.refit_cuda_engine():
        raise EngineError(f"{path}: TensorRT can't refit {program} ({log.first()}); rebuild it")


def as_stored(trt: ModuleType, values: NDArray[Any] | None, prototype: Any) -> Any:
    """Give values in a type of BITS the engine's type; return others as they are.

    Returns None if the sizes differ.
    """
    if values is None or values.dtype not in BITS:
        return values
    if values.nbytes != prototype.nbytes:
        return None
    return trt.Weights(prototype.dtype, values.ctypes.data, prototype.size)
