"""The custom ops of step programs: each has a PyTorch reference and a facet for each target.

Importing this package registers the ops under `torch.ops.mtpbuild`. A new op is a folder with
`op.py` (definition and plain PyTorch reference), which is found here, and a file for each target
with a facet; the target's table names the file.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from torch._library.custom_ops import CustomOpDef

from mtpbuild.plugins.accept_mixed.op import accept_mixed_op
from mtpbuild.plugins.accept_rewind.op import accept_best, accept_rewind, best_of_blocks
from mtpbuild.plugins.causal_conv.op import causal_conv, last_inputs
from mtpbuild.plugins.definition import EMPTY_RESULTS, NODES
from mtpbuild.plugins.delta_rule.op import delta_advance, delta_rule
from mtpbuild.plugins.draw.op import draw
from mtpbuild.plugins.embedding_nbits.op import embedding_nbits
from mtpbuild.plugins.experts.op import experts
from mtpbuild.plugins.experts_packed.op import experts_packed
from mtpbuild.plugins.gated_packed.op import gated_packed
from mtpbuild.plugins.gated_product.op import gated_product
from mtpbuild.plugins.gelu_gate.op import gelu_gate
from mtpbuild.plugins.grouped_attention.op import grouped_attention
from mtpbuild.plugins.grouped_rows.op import (
    grouped_attention_flat,
    grouped_rows,
    grouped_rows_write,
)
from mtpbuild.plugins.kv_write.op import kv_write
from mtpbuild.plugins.matmul_scaled.op import matmul_scaled
from mtpbuild.plugins.matmul_wide.op import matmul_wide
from mtpbuild.plugins.mix_streams.op import balance_streams
from mtpbuild.plugins.mla_attention.op import mla_attention
from mtpbuild.plugins.mla_heads.op import mla_queries, mla_values
from mtpbuild.plugins.mla_packed.op import mla_packed
from mtpbuild.plugins.mla_rows.op import mla_rows, mla_rows_write
from mtpbuild.plugins.moe.op import moe, moe_route, root_route
from mtpbuild.plugins.norm_sum.op import norm_sum
from mtpbuild.plugins.product_packed.op import product_packed
from mtpbuild.plugins.rope.op import rope
from mtpbuild.plugins.rotary_rows.op import rotary_rows
from mtpbuild.plugins.shaped_probs.op import shaped_probs
from mtpbuild.plugins.soft_cap.op import soft_cap
from mtpbuild.plugins.softmax_route.op import softmax_route
from mtpbuild.plugins.sparse_rows.op import choose_rows, index_keys
from mtpbuild.plugins.sum_of_ranks.op import sum_of_ranks
from mtpbuild.plugins.take_rows.op import take_rows
from mtpbuild.plugins.weigh_experts.op import weigh_experts

# A table maps an op's name to a file of the op's folder, where the function <op>_<file> is the
# facet. Two entries name no file: "plugins" turns the launches in triton.py into AOT plugins of
# TensorRT, and "node" emits the ONNX node of the op's definition.
FacetTable: TypeAlias = Mapping[str, str]
for _file in sorted(Path(__file__).parent.glob("*/op.py")):
    import_module(f"{__name__}.{_file.parent.name}.op")
OPS = {op._name: op for op in EMPTY_RESULTS}
NODE_FACETS: FacetTable = {op._name: "node" for op in NODES}  # operators of the CPU's library

# The ops for which PyTorch calls a facet on CUDA tensors; other ops run their reference.
CUDA: FacetTable = dict.fromkeys(
    (
        *("accept_rewind", "choose_rows", "kv_write", "matmul_scaled", "matmul_wide"),
        *("mla_attention", "moe", "moe_route"),
    ),
    "triton",
)

# In programs that update state in place, these GPU facets are replaced by ops that write into an
# operand: facet -> (op, index of the operand, index of the result that the operand becomes).
IN_PLACE = {"mtpbuild_triton::mla_rows_write": ("mtpbuild_triton::mla_rows_into", 5, 2)}

# Ops whose GPU facets take the partial sums of a product as their first operand and add them. This
# saves a launch if no other op reads that product.
SUM_PARTS = (balance_streams, mla_queries, mla_rows, mla_rows_write, moe_route, root_route)


def facets(table: FacetTable) -> dict[Any, Callable[..., Any]]:
    """Return the facet of each op of a table, keyed by the op's overload in exported graphs."""
    return {OPS[name]._opoverload: facet(OPS[name], file) for name, file in table.items()}


def facet(op: CustomOpDef, file: str) -> Callable[..., Any]:
    """Import and return the function for an entry of a table."""
    reference = op._init_fn
    name = op._qualname.rpartition("::")[2]
    folder = reference.__module__.rpartition(".")[0]
    if file == "plugins":
        from mtpbuild.plugins.aot import as_plugins

        return as_plugins(getattr(import_module(f"{folder}.triton"), f"{name}_launches"))
    if file == "node":
        from mtpbuild.plugins.cpu.onnx import make_node_facet

        return make_node_facet(op)
    function: Callable[..., Any] = getattr(import_module(f"{folder}.{file}"), f"{name}_{file}")
    return function


for _name in CUDA:
    # The facet, with its import of triton, is loaded at the first call.
    OPS[_name].register_kernel(
        "cuda", lambda *operands, name=_name: facet(OPS[name], CUDA[name])(*operands)
    )
