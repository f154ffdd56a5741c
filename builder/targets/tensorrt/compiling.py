"""Compile networks by TensorRT or TensorRT-RTX.

This includes stripping weights from engines, and keeping TensorRT's timings for later builds.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mtpbuild.builder.plan.plan import Plan
from mtpbuild.runtime.errors import BuildError
from mtpbuild.runtime.files import find_user_cache
from mtpbuild.runtime.programs.tensorrt_api import make_error_logger

FAST = 1  # of TensorRT's levels 0 to 5; the default is 3


def make_compiler_config(
    trt: ModuleType, builder: Any, network: Any, plan: Plan, *, fast: bool = False
) -> Any:
    """Return the compiler's settings; with `fast` it tries fewer kernels."""
    config = builder.create_builder_config()
    # With TF32 a window of four tokens could give other tokens than four steps.
    config.clear_flag(trt.BuilderFlag.TF32)
    if fast:
        config.builder_optimization_level = FAST
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    if varying := [tensor for tensor in inputs if -1 in tuple(tensor.shape)]:
        # A prompt's chunk has 1 to `prefill_chunk` tokens; optimise for full chunks.
        profile = builder.create_optimization_profile()
        for tensor in varying:
            least, largest = (
                tuple(chunk if size == -1 else size for size in tensor.shape)
                for chunk in (1, plan.prefill_chunk)
            )
            profile.set_shape(tensor.name, least, largest, largest)
        config.add_optimization_profile(profile)
    return config


def compile_network(trt: ModuleType, builder: Any, network: Any, config: Any, program: str) -> Any:
    """Compile the network; return the engine's bytes. Raises BuildError with the first error."""
    log = make_error_logger(trt)
    log.errors.clear()
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise BuildError(f"TensorRT can't compile {program}: {log.first()}")
    return engine


def strip(
    trt: ModuleType,
    network: Any,
    config: Any,
    values: Mapping[str, Tensor],
    constants: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Leave the weights out of the engine; return those that are not among `values`, by name.

    Each weight gets a name, by which it is put back when the engine is loaded. values: the weights
    file's tensors by name, in memory that the network shares. constants: weights in types that
    NumPy lacks, by the names of their layers.
    """
    config.set_flag(trt.BuilderFlag.STRIP_PLAN)
    config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)  # TensorRT may optimise for these very values
    known = {value.data_ptr(): name for name, value in values.items()}
    others: dict[str, Tensor] = {}
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type != trt.LayerType.CONSTANT:
            continue
        layer.__class__ = trt.IConstantLayer  # its true class; the network returns the base class
        weights = layer.weights
        if isinstance(weights, trt.Weights):  # no array, as NumPy lacks the dtype
            held = constants[layer.name]
            weights = trt.Weights(weights.dtype, held.data_ptr(), weights.size)
        else:
            held = torch.from_numpy(weights)
        address = held.data_ptr()
        if address not in known:
            known[address] = f"constant.{len(others)}"
            others[known[address]] = held.clone()
        named = network.set_weights_name(weights, known[address])
        assert named, "TensorRT takes the name"
    return others


def find_timing_cache(version: str, capability: str) -> Path:
    """Return the path of the timing cache, below XDG_CACHE_HOME or ~/.cache."""
    return find_user_cache() / f"tensorrt-{version}-sm{capability.replace('.', '')}.timing"


@contextlib.contextmanager
def keep_timing_cache(trt: ModuleType, config: Any, capability: str) -> Iterator[None]:
    """Give `config` the timings of earlier builds, and store those of the build inside.

    Later builds then measure only new layers. A file of another GPU, or a damaged one, is replaced.
    If the file can't be read or written, a note says so, and the build only takes longer.
    """
    path = find_timing_cache(trt.__version__, capability)
    with _collect_notes(path):
        known = path.read_bytes() if path.exists() else b""
        cache = config.create_timing_cache(known)
        if cache is None or not config.set_timing_cache(cache, False):
            config.set_timing_cache(config.create_timing_cache(b""), False)
    yield
    with _collect_notes(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")  # several builds may run at the same time
        fresh.write_bytes(bytes(config.get_timing_cache().serialize()))
        fresh.replace(path)


@contextlib.contextmanager
def _collect_notes(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        logging.getLogger(__name__).warning("note: no timing cache at %s (%s)", path, reason)
