"""Estimate the memory of a program's intermediate results from its exported graph."""

from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from mtpbuild import plugins
from mtpbuild.builder.program.trace import TracedProgram

PRODUCTS = {"matmul", "mm", "bmm", "linear", "addmm", "baddbmm"}  # PyTorch's
# Ops of ours. On a GPU PyTorch's operators compute `take_rows`.
OURS = {op._opoverload for op in plugins.OPS.values()} - {plugins.take_rows._opoverload}
ALONE = {"topk", "sort", "cumsum", "scatter"}  # operators that nothing is fused with
VIEW, OPERATOR, KERNEL = "view", "operator", "kernel"


def find_role(node: Node) -> str:
    """Return VIEW for a call that launches nothing, OPERATOR for PyTorch's, KERNEL for all else."""
    op = node.target
    if node.op != "call_function":
        return KERNEL
    results = pytree.tree_leaves(node.meta.get("val"))
    if not isinstance(op, torch._ops.OpOverload) or not any(isinstance(x, Tensor) for x in results):
        return VIEW
    if op.namespace == "_c10d_functional":
        return VIEW if op is torch.ops._c10d_functional.wait_tensor.default else KERNEL
    if op in OURS or _call_name(node) in PRODUCTS:
        return KERNEL
    if op is torch.ops.aten.clone.default and node.all_input_nodes[0].op == "placeholder":
        return VIEW  # state that is passed on
    return VIEW if any(result.alias_info is not None for result in op._schema.returns) else OPERATOR


def count_temporary_bytes(traced: TracedProgram) -> int:
    """Return the most bytes of results held at once; symbolic sizes count with their upper bounds.

    A result that only fused operators read is never held. A result of a state's shape is written
    over that state. The memory that our kernels hold between their launches is not counted.
    """
    ranges = traced.exported.range_constraints
    bounds = {symbol: bound.upper for symbol, bound in ranges.items()}
    nodes = list(traced.exported.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    states = {_shape_key(node.meta["val"]) for node in nodes if node.op == "placeholder"}
    readers: dict[Node, set[str]] = {}  # roles of a result's readers, also through views
    last: dict[Node, int] = {}  # place of a result's last read, also through results not held
    change = [0] * (len(nodes) + 1)
    for node in reversed(nodes):
        readers[node] = set()
        last[node] = place[node]
        for user in node.users:
            role = find_role(user)
            readers[node] |= readers[user] if role == VIEW else {role}
            passes_on = role == VIEW or _is_fused(user, readers)
            last[node] = max(last[node], last[user] if passes_on else place[user])
        if node.op != "call_function" or find_role(node) == VIEW or _is_fused(node, readers):
            continue
        leaves = pytree.tree_leaves(node.meta["val"])
        results = [x for x in leaves if isinstance(x, Tensor) and _shape_key(x) not in states]
        size = sum(_count_nbytes(result, bounds) for result in results)
        change[place[node]] += size
        change[last[node] + 1] -= size
    return max(accumulate(change))


def _call_name(node: Node) -> str:
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target._schema.name.partition("::")[2]


def _is_fused(node: Node, readers: dict[Node, set[str]]) -> bool:
    fusable = find_role(node) == OPERATOR and _call_name(node) not in ALONE
    return fusable and readers[node] <= {OPERATOR}


def _shape_key(value: Any) -> tuple[Any, ...]:
    return (*map(str, value.shape), value.dtype) if isinstance(value, Tensor) else ()


def _count_nbytes(value: Tensor, bounds: dict[Any, Any]) -> int:
    sizes: tuple[Any, ...] = tuple(value.shape)
    known = (
        int(size.node.expr.xreplace(bounds)) if isinstance(size, torch.SymInt) else size
        for size in sizes
    )
    return prod(known) * int(value.element_size())
