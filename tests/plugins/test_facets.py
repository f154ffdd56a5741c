"""The table of facets: every entry is a function, and every file of an op's folder is an entry."""

from pathlib import Path
from typing import Any

import pytest
import torch

import mtpbuild.plugins
from mtpbuild.plugins import FACETS, TARGETS, facet, facets, file_of

FOLDER = Path(mtpbuild.plugins.__file__).parent


def folder_of(op: Any) -> str:
    return str(op._init_fn.__module__.split(".")[-2])


@pytest.mark.parametrize("target", TARGETS)
def test_every_entry_is_a_function(target: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
    wanted = {op._opoverload for op in FACETS if file_of(op, target)}
    found = facets(target)
    assert found.keys() == wanted
    assert all(callable(function) for function in found.values())


def test_every_file_is_an_entry() -> None:
    entries = {
        (folder_of(op), "triton" if file == "plugins" else file)
        for op, row in FACETS.items()
        for file in ("op", *row)
        if file
    }
    files = {
        (path.parent.name, path.stem) for path in FOLDER.glob("*/*.py") if path.stem != "__init__"
    }
    assert files == entries


def test_a_reference_is_the_op_itself() -> None:
    rope = mtpbuild.plugins.rope
    assert facet(rope, "inductor") is rope._init_fn


def test_cuda_tensors_get_the_facet() -> None:
    """What PyTorch calls for CUDA tensors, here on the CPU and in Triton's interpreter."""
    triton = pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
    if not triton.knobs.runtime.interpret:
        pytest.skip("a GPU runs it in tests/gpu")
    kernels = {op: op._backend_fns for op in FACETS}
    assert {op for op in FACETS if "cuda" in kernels[op]} == {
        op for op in FACETS if file_of(op, "cuda")
    }
    write = mtpbuild.plugins.kv_write
    operands = (torch.zeros(1, 1, 5, 2), torch.ones(1, 1, 2, 2), torch.tensor([3]))
    assert torch.equal(kernels[write]["cuda"](*operands), write(*operands))
