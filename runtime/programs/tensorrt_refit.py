"""Puts the weights back into an engine that was compiled without them."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.programs.tensorrt_api import errors_of

WEIGHTS = "weights.safetensors"  # of all programs; an engine that holds its weights has none
CONSTANTS = "{}.constants.safetensors"  # of one: what it needs and no checkpoint has
DTYPES = {"F32": np.float32, "I64": np.int64, "I32": np.int32, "BOOL": np.bool_, "U8": np.uint8}


def refit(trt: ModuleType, engine: Any, folder: Path, program: str) -> None:
    """Raises EngineError if the files are not those that the engine was compiled with."""
    path = folder / CONSTANTS.format(program)
    log = errors_of(trt)
    log.errors.clear()
    refitter = trt.Refitter(engine, log)
    weights = mapped(folder / WEIGHTS) | mapped(path)  # must live until they are taken
    for name in refitter.get_all_weights():
        given = as_stored(trt, weights.get(name), refitter.get_weights_prototype(name))
        if given is None or not refitter.set_named_weights(name, given):
            raise EngineError(f"{path}: {name} of {program} does not fit; rebuild the engine")
    if not refitter.refit_cuda_engine():
        raise EngineError(f"{path}: TensorRT can't refit {program} ({log.first()}); rebuild it")


def as_stored(trt: ModuleType, values: NDArray[Any] | None, prototype: Any) -> Any:
    """Bytes as the type that the engine has them for: quantised values. None: they do not fit."""
    if values is None or values.dtype != np.uint8:
        return values
    if values.nbytes != prototype.nbytes:
        return None
    return trt.Weights(prototype.dtype, values.ctypes.data, prototype.size)


def mapped(path: Path) -> dict[str, NDArray[Any]]:
    """Tensors of a safetensors file, flat, read when they are used."""
    data = np.memmap(path, mode="r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)
    return {
        name: data[slice(*(start + offset for offset in entry["data_offsets"]))].view(
            DTYPES[entry["dtype"]]
        )
        for name, entry in header.items()
    }
