"""Tables of facets: every entry is a function, and every file of an op's folder is an entry."""

from pathlib import Path
from typing import Any

import pytest
import torch

import mtpbuild.plugins
from mtpbuild.builder.targets.lower_tensorrt import TENSORRT
from mtpbuild.builder.targets.onnx_graph import ONNX
from mtpbuild.builder.targets.passes.gpu_graph import GPU
from mtpbuild.plugins import CPU, CUDA, OPS, PYTORCH, FacetTable, facet, facets

TABLES = {
    "onnx": ONNX,
    "cpu": CPU,
    "pytorch": PYTORCH,
    "gpu": GPU,
    "cuda": CUDA,
    "tensorrt": TENSORRT,
}
FOLDER = Path(mtpbuild.plugins.__file__).parent


def folder_of(op: Any) -> str:
    return str(op._init_fn.__module__.split(".")[-2])


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_entry_is_a_function(table: FacetTable) -> None:
    pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
    found = facets(table)
    assert found.keys() == {op._opoverload for op in table}
    assert all(callable(function) for function in found.values())


def test_every_file_is_an_entry() -> None:
    entries = {
        (folder_of(op), "triton" if file == "plugins" else file)
        for table in (dict.fromkeys(OPS, "op"), *TABLES.values())
        for op, file in table.items()
        if file != "node"  # of the op's definition
    }
    files = {
        (path.parent.name, path.stem)
        for path in FOLDER.glob("*/*.py")
        if path.stem != "__init__" and path.parent.name != "cpu"  # no op, but what several share
    }
    assert files == entries


def test_a_reference_is_the_op_itself() -> None:
    rope = mtpbuild.plugins.rope
    assert facet(rope, PYTORCH[rope]) is rope._init_fn


def test_cuda_tensors_get_the_facet() -> None:
    """What PyTorch calls for CUDA tensors, here on the CPU and in Triton's interpreter."""
    triton = pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
    if not triton.knobs.runtime.interpret:
        pytest.skip("a GPU runs it in tests/gpu")
    kernels = {op: op._backend_fns for op in OPS}
    assert {op for op in OPS if "cuda" in kernels[op]} == CUDA.keys()
    write = mtpbuild.plugins.kv_write
    operands = (torch.zeros(1, 1, 5, 2), torch.ones(1, 1, 2, 2), torch.tensor([3]))
    assert torch.equal(kernels[write]["cuda"](*operands), write(*operands))
