"""Tables of facets: every entry is a function, and every file of an op's folder is an entry."""

from pathlib import Path
from typing import Any

import pytest
import torch

import mtpbuild.plugins
from mtpbuild.builder.targets.inductor.pipeline import INDUCTOR, INDUCTOR_CUDA
from mtpbuild.builder.targets.onnxruntime.pipeline import CPU, PORTABLE
from mtpbuild.builder.targets.tensorrt.pipeline import TENSORRT
from mtpbuild.plugins import CUDA, NODE_FACETS, OPS, FacetTable, facets, gated_product
from mtpbuild.plugins.definition import keep
from mtpbuild.plugins.gated_product.op import MAX_TOKENS
from tests.support.op_calls import OpCalls

TABLES = {
    "portable": PORTABLE.ops,
    "cpu": {**NODE_FACETS, **CPU.ops},
    "inductor": INDUCTOR.ops,
    "inductor on a GPU": INDUCTOR_CUDA.ops,
    "cuda": CUDA,
    "tensorrt": TENSORRT.facets,
}
FOLDER = Path(mtpbuild.plugins.__file__).parent


def folder_of(op: Any) -> str:
    return str(op._init_fn.__module__.split(".")[-2])


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_entry_is_a_function(table: FacetTable) -> None:
    pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
    found = facets(table)
    assert found.keys() == {OPS[name]._opoverload for name in table}
    assert all(callable(function) for function in found.values())


def test_every_file_is_an_entry() -> None:
    entries = {
        (folder_of(op), "triton" if file == "plugins" else file)
        for table in (dict.fromkeys(OPS, "op"), *TABLES.values())
        for op, file in ((OPS[name], file) for name, file in table.items())
        if file != "node"  # of the op's definition
    }
    files = {
        (path.parent.name, path.stem)
        for path in FOLDER.glob("*/*.py")
        if path.stem != "__init__" and path.parent.name != "cpu"  # no op, but what several share
    }
    assert files == entries


def test_an_op_that_is_not_kept_is_traced_through() -> None:
    """A limit of the kernel does the same for operands that it can't take."""
    x, weight = torch.rand(MAX_TOKENS, 4), torch.rand(4, 6)
    few, many = OpCalls(gated_product._opoverload), OpCalls(gated_product._opoverload)
    with few:
        got = gated_product(x, weight)
    with many, keep(()):
        assert torch.equal(gated_product(x, weight), got)
    with many:
        gated_product(torch.rand(MAX_TOKENS + 1, 4), weight)
    assert len(few.seen) == 1
    assert not many.seen


def test_cuda_tensors_get_the_facet() -> None:
    """What PyTorch calls for CUDA tensors, here on the CPU and in Triton's interpreter."""
    triton = pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
    if not triton.knobs.runtime.interpret:
        pytest.skip("a GPU runs it in tests/gpu")
    kernels = {name: op._backend_fns for name, op in OPS.items()}
    assert {name for name in OPS if "cuda" in kernels[name]} == CUDA.keys()
    write = mtpbuild.plugins.kv_write
    operands = (torch.zeros(1, 1, 5, 2), torch.ones(1, 1, 2, 2), torch.tensor([3]))
    assert torch.equal(kernels["kv_write"]["cuda"](*operands), write(*operands))
