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

from mtpbuild.runtime.cpu_library import DOMAIN, find_library
from tests.support import exact
from tests.support.cpu_host import record
from tests.support.isas import isas
from tests.support.scripts import ROOT, load_script

SOURCE = ROOT / "plugins/cpu/source"
HOST = Path(__file__).with_name("cpu_host.cpp")
SANITIZED = os.environ.get("SANITIZED_CPU_LIBRARY")  # `test_sanitizers` sets it
LIBRARY = Path(SANITIZED) if SANITIZED else find_library()
Array = NDArray[Any]
# None: it is left out. A tensor is a cache in bfloat16, which NumPy doesn't have.
Operands = Mapping[str, Array | torch.Tensor | None]
Results = list[Array]
TYPES: dict[Any, int] = {
    np.float32: onnx.TensorProto.FLOAT,
    np.int8: onnx.TensorProto.INT8,
    np.int32: onnx.TensorProto.INT32,
    np.int64: onnx.TensorProto.INT64,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
}


def make_node(op: str, inputs: Sequence[str], outputs: Sequence[str], **how: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, domain=DOMAIN, **how)


def make_model(
    nodes: Sequence[onnx.NodeProto], given: Mapping[str, Array], results: Mapping[str, int]
) -> onnx.ModelProto:
    """Return a model for arrays of these types and ranks; results: types by name."""
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(x.dtype), [None] * x.ndim
        )
        for name, x in given.items()
    ]
    outputs = [helper.make_tensor_value_info(n, kind, None) for n, kind in results.items()]
    graph = helper.make_graph(nodes, "nodes", inputs, outputs)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def open_session(model: onnx.ModelProto, threads: int = 2) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = False  # so that a sanitizer sees where a result ends
    options.register_custom_ops_library(str(LIBRARY))
    return ort.InferenceSession(model.SerializeToString(), options)


def run(op: str, given: Operands, results: tuple[Any, ...], threads: int, **how: Any) -> Results:
    """Run one node of the library, with results of these types."""
    arrays = [x for x in given.values() if not isinstance(x, torch.Tensor)]
    whole = len(arrays) == len(given)
    try:
        found = _run(op, given, results, threads, how)
    except Exception as error:
        if whole:
            record(op, how, arrays, str(error))
        raise
    if whole:
        record(op, how, arrays, [*found])
    return found


def _run(
    op: str, given: Operands, results: tuple[Any, ...], threads: int, how: Mapping[str, Any]
) -> Results:
    float_kind, half_kind = onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16
    feed = {
        name: x.float().numpy() if isinstance(x, torch.Tensor) else x
        for name, x in given.items()
        if x is not None
    }
    operands = [
        f"{name}16" if isinstance(x, torch.Tensor) else name if name in feed else ""
        for name, x in given.items()
    ]
    names = [f"y{i}" for i in range(len(results))]
    made = [
        f"{name}16" if TYPES[kind] == half_kind else name
        for name, kind in zip(names, results, strict=True)
    ]
    nodes = [
        *(
            helper.make_node("Cast", [name], [operand], to=half_kind)
            for name, operand in zip(given, operands, strict=True)
            if operand.endswith("16")
        ),
        make_node(op, operands, made, **how),
        *(
            helper.make_node("Cast", [inner], [name], to=float_kind)
            for name, inner in zip(names, made, strict=True)
            if name != inner
        ),
    ]
    kinds = {
        name: float_kind if TYPES[kind] == half_kind else TYPES[kind]
        for name, kind in zip(names, results, strict=True)
    }
    session = open_session(make_model(nodes, feed, kinds), threads)
    return [np.asarray(y) for y in session.run(None, feed)]


def same_everywhere(
    patch: pytest.MonkeyPatch, op: str, given: Operands, results: tuple[Any, ...], **how: Any
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
    says: str, op: str, given: Operands, results: tuple[Any, ...], **how: Any
) -> None:
    """Check that a node is refused, in its own name."""
    with pytest.raises(Exception, match=f"mtpbuild {op}: {says}"):
        run(op, given, results, 1, **how)


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
