"""What tests of the CPU's kernels share: the library, random weights, and attention by token."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import helper

from mtpbuild.runtime.cpu_library import find_library
from tests.support import exact
from tests.support.cpu_host import record
from tests.support.isas import isas
from tests.support.scripts import ROOT, load_script

SOURCE = ROOT / "plugins/cpu/source"
HOST = Path(__file__).with_name("cpu_host.cpp")
SANITIZED = os.environ.get("SANITIZED_CPU_LIBRARY")  # `test_sanitizers` sets it
LIBRARY = Path(SANITIZED) if SANITIZED else find_library()
Operands = Mapping[str, NDArray[Any] | None]  # None: it is left out
Results = list[NDArray[Any]]
TYPES: dict[type, int] = {
    np.float32: onnx.TensorProto.FLOAT,
    np.int8: onnx.TensorProto.INT8,
    np.int32: onnx.TensorProto.INT32,
    np.int64: onnx.TensorProto.INT64,
}


def run(op: str, given: Operands, results: tuple[type, ...], threads: int, **how: Any) -> Results:
    """Run one node of the library, with results of these types."""
    try:
        found = _run(op, given, results, threads, how)
    except Exception as error:
        record(op, how, given.values(), str(error))
        raise
    record(op, how, given.values(), [*found])
    return found


def _run(
    op: str, given: Operands, results: tuple[type, ...], threads: int, how: Mapping[str, Any]
) -> Results:
    there = {name: array for name, array in given.items() if array is not None}
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(x.dtype), [None] * x.ndim
        )
        for name, x in there.items()
    ]
    names = [f"y{i}" for i in range(len(results))]
    outputs = [
        helper.make_tensor_value_info(name, TYPES[kind], None)
        for name, kind in zip(names, results, strict=True)
    ]
    operands = [name if name in there else "" for name in given]
    node = helper.make_node(op, operands, names, domain="mtpbuild", **how)
    graph = helper.make_graph([node], "one", inputs, outputs)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("mtpbuild", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.enable_cpu_mem_arena = False  # so that a sanitizer sees where a result ends
    options.register_custom_ops_library(str(LIBRARY))
    found = ort.InferenceSession(model.SerializeToString(), options).run(None, there)
    return [np.asarray(each) for each in found]


def same_everywhere(
    patch: pytest.MonkeyPatch, op: str, given: Operands, results: tuple[type, ...], **how: Any
) -> Results:
    """Run on every instruction set, with one thread and two; all must agree to the bit."""
    first: Results | None = None
    for isa in isas():
        patch.setenv("MTPBUILD_CPU_ISA", isa)
        for threads in (1, 2):
            found = run(op, given, results, threads, **how)
            first = found if first is None else first
            assert [each.tobytes() for each in found] == [each.tobytes() for each in first]
    assert first is not None
    return first


def check_refused(
    says: str, op: str, given: Operands, results: tuple[type, ...], **how: Any
) -> None:
    """Check that a node is refused, in its own name."""
    with pytest.raises(Exception, match=f"mtpbuild {op}: {says}"):
        run(op, given, results, 1, **how)


def random_weight(
    rng: np.random.Generator, shape: tuple[int, ...], bits: int
) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.int32]]:
    """Values and scales of a weight [.., N, K] as checkpoints store them, and its integers."""
    *outer, K = shape
    integers = rng.integers(0, 1 << bits, (*outer, K // 32, 32))
    stored: NDArray[Any] = integers.astype(np.uint8)
    if bits == 4:
        stored = stored[..., 0::2] | stored[..., 1::2] << 4
    scales = (0.01 * rng.standard_normal((*outer, K // 32))).astype(np.float16)
    zero = 1 << bits - 1
    return torch.from_numpy(stored), torch.from_numpy(scales), (integers - zero).astype(np.int32)


def attended(given: Mapping[str, NDArray[Any]], scale: float, latent: int) -> NDArray[np.float32]:
    """Return what each token says, by itself, of the rows that it sees."""
    B, H, T, _ = given["q"].shape
    y = np.empty((B, H, T, latent), np.float32)
    for b in range(B):
        base, first = int(given["base"][b]), int(given["first"][b])
        for t in range(T):
            fresh = given["fresh"][b, 0, : first + t + 1]
            rows = np.concatenate([given["cache"][b, 0, :base], fresh])
            y[b, :, t] = exact.attention(given["q"][b, :, t], rows, scale, latent)
    return y


def load_backend() -> ModuleType:
    """Import the build backend, which compiles the library."""
    return load_script(ROOT / "tools/compile_kernels.py")


def compiled(
    sources: Path,
    library: Path,
    *flags: str,
    level: str = "-O2",
    compiler: Sequence[str] = ("g++",),
    machine: str = "x86_64",
) -> Path:
    """Compile the library from a copy of its sources, as the installation does but for `flags`."""
    whole = [] if flags else ["-Wl,--no-undefined"]  # it needs C++'s libraries alone
    load_backend().compile_library(
        library, compiler, source=sources, machine=machine, flags=(*flags, *whole, level)
    )
    return library
