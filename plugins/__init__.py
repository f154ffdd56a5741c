"""The step program's own ops: each is a reference, with a facet per target.

Importing this package registers the ops under `torch.ops.mtpbuild`. A new op is a folder with
`op.py` (signature, shapes and plain PyTorch reference), a file per target that it has a facet for,
and a line of `FACETS`.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from mtpbuild.plugins.accept_mixed.op import accept_mixed_op as accept_mixed_op
from mtpbuild.plugins.accept_rewind.op import accept_rewind as accept_rewind
from mtpbuild.plugins.experts.op import experts as experts
from mtpbuild.plugins.experts_nbits.op import experts_nbits as experts_nbits
from mtpbuild.plugins.gated_product.op import gated_product as gated_product
from mtpbuild.plugins.grouped_attention.op import grouped_attention as grouped_attention
from mtpbuild.plugins.kv_write.op import kv_write as kv_write
from mtpbuild.plugins.matmul_nbits.op import matmul_nbits as matmul_nbits
from mtpbuild.plugins.matmul_scaled.op import (
    dequantise_scaled as dequantise_scaled,
)
from mtpbuild.plugins.matmul_scaled.op import (
    matmul_scaled as matmul_scaled,
)
from mtpbuild.plugins.matmul_wide.op import matmul_wide as matmul_wide
from mtpbuild.plugins.mla_attention.op import mla_attention as mla_attention
from mtpbuild.plugins.mla_heads.op import mla_queries as mla_queries
from mtpbuild.plugins.mla_heads.op import mla_values as mla_values
from mtpbuild.plugins.mla_rows.op import mla_rows as mla_rows
from mtpbuild.plugins.mla_rows.op import mla_rows_write as mla_rows_write
from mtpbuild.plugins.moe.op import moe as moe
from mtpbuild.plugins.moe.op import moe_route as moe_route
from mtpbuild.plugins.rope.op import rope as rope
from mtpbuild.plugins.rotary_rows.op import rotary_rows as rotary_rows
from mtpbuild.plugins.shaped_probs.op import shaped_probs_op as shaped_probs_op

# Which file in an op's folder has its facet for a target: the function <op>_<file>. "op" is the
# reference itself; "plugins": an AOT plugin for each of triton.py's <op>_launches; None: the target
# has no use for the op, or does it as the comment says.
#
# inductor: PyTorch operators, for AOTInductor to compile; they also stand in where a graph for
#           TensorRT or for a GPU has no facet of its own.
# gpu:      what takes their place in AOTInductor's graphs for a GPU.
# cuda:     what the op does by itself, when PyTorch calls it with CUDA tensors; else the reference.
TARGETS = ("onnx", "inductor", "gpu", "cuda", "tensorrt")
FACETS: dict[Any, tuple[str | None, ...]] = {
    # op                onnx    inductor    gpu       cuda      tensorrt
    accept_mixed_op:   (None,   "op",       "triton", None,     "plugins"),
    accept_rewind:     ("onnx", "op",       "triton", "triton", "plugins"),
    dequantise_scaled: (None,   "op",       None,     None,     None),
    experts:           ("onnx", "op",       None,     None,     None),  # GPUs have moe
    experts_nbits:     ("onnx", "op",       None,     None,     None),
    gated_product:     (None,   "op",       "triton", None,     None),
    grouped_attention: ("onnx", "inductor", None,     None,     None),  # GPU targets refuse it
    kv_write:          ("onnx", "inductor", None,     "triton", "tensorrt"),  # gpu: would copy
    matmul_nbits:      ("onnx", "op",       None,     None,     None),
    matmul_scaled:     (None,   "op",       "triton", "triton", "tensorrt"),
    matmul_wide:       (None,   "op",       "triton", "triton", "tensorrt"),
    mla_attention:     ("onnx", "inductor", "triton", "triton", "plugins"),
    mla_queries:       (None,   "op",       "triton", None,     None),
    mla_rows:          (None,   "op",       "triton", None,     None),
    mla_rows_write:    (None,   "op",       "triton", None,     None),
    mla_values:        (None,   "op",       "triton", None,     None),
    moe:               (None,   "op",       "triton", "triton", "tensorrt"),
    moe_route:         (None,   "op",       "triton", "triton", None),
    rope:              ("onnx", "op",       None,     None,     None),
    rotary_rows:       (None,   "op",       "triton", None,     None),
    shaped_probs_op:   (None,   "op",       "triton", None,     "plugins"),
}  # fmt: skip

# Where a program writes its state in place, some facets on a GPU give way to an op that writes into
# an operand: facet -> that op, the operand's place, and the place of the result that it is.
IN_PLACE = {"mtpbuild_triton::mla_rows_write": ("mtpbuild_triton::mla_rows_into", 5, 2)}

# Ops whose facets on a GPU take a product's parts for their first operand, and sum them: where no
# other op reads a product by `matmul_scaled`, a launch is saved.
SUM_PARTS = (mla_queries, mla_rows, mla_rows_write)


def facets(target: str) -> dict[Any, Callable[..., Any]]:
    """Map each op to its facet for one of `TARGETS`; this imports what the target needs."""
    return {op._opoverload: facet(op, target) for op in FACETS if file_of(op, target)}


def file_of(op: Any, target: str) -> str | None:
    """The table's entry for an op and a target."""
    return FACETS[op][TARGETS.index(target)]


def facet(op: Any, target: str) -> Callable[..., Any]:
    """The function that an op's entry stands for."""
    file, reference = file_of(op, target), op._init_fn
    if file == "op":
        return reference
    name = op._qualname.rpartition("::")[2]
    folder = reference.__module__.rpartition(".")[0]
    if file == "plugins":
        from mtpbuild.plugins.aot import as_plugins

        return as_plugins(getattr(import_module(f"{folder}.triton"), f"{name}_launches"))
    return getattr(import_module(f"{folder}.{file}"), f"{name}_{file}")


def _on_cuda(op: Any) -> Callable[..., Any]:
    """Load the op's facet when it is first called with CUDA tensors."""
    return lambda *operands: facet(op, "cuda")(*operands)


for _op in FACETS:
    if file_of(_op, "cuda"):
        _op.register_kernel("cuda", _on_cuda(_op))
