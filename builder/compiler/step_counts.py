"""Count a program's calls and intermediate results in its exported graph."""

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from mtpbuild import plugins
from mtpbuild.builder.program.trace import TracedProgram
from mtpbuild.runtime.files import format_size

PRODUCTS = {"matmul", "mm", "bmm", "linear", "addmm", "baddbmm"}  # PyTorch's
OWN_PRODUCTS = {op._opoverload for op in (plugins.matmul_scaled, plugins.matmul_wide)}
ONE_SHOT = plugins.sum_of_ranks._opoverload
GATHERS = plugins.take_rows._opoverload  # on a GPU PyTorch's operators compute it
OWN = {op._opoverload for op in plugins.OPS.values()} - OWN_PRODUCTS - {GATHERS}
ALONE = {"topk", "sort", "cumsum", "scatter"}  # operators that nothing is fused with


@dataclass(frozen=True)
class StepCounts:
    """The number of nodes of one program's graph, and its calls by kind.

    Views and sizes are not calls. A call of an op of ours may be several kernels, and a compiler
    may make one kernel of several of PyTorch's operators.
    """

    nodes: int
    products: int = 0
    own: int = 0  # ops of ours that are not products
    others: int = 0
    collectives: int = 0
    one_shot: int = 0  # collectives by a kernel of ours
    summed: int = 0  # bytes that a rank gives to its collectives
    temporary: int = 0  # bytes of intermediate results that are held at once


def count_step_calls(traced: TracedProgram, temporary: int = 0) -> StepCounts:
    """Count the calls of an exported program; temporary: bytes of its intermediate results."""
    nodes, counts, summed = list(traced.exported.graph.nodes), Counter[str](), 0
    for node in nodes:
        if node.op != "call_function" or (kind := call_kind(node)) is None:
            continue
        counts[kind] += 1
        if kind == "collectives":
            operand = node.args[0].meta["val"]  # each symbolic size counts as 1
            summed += prod(n for n in operand.shape if isinstance(n, int)) * operand.element_size()
            counts["one_shot"] += node.target is ONE_SHOT
    return StepCounts(len(nodes), **counts, summed=summed, temporary=temporary)


def call_name(node: Node) -> str:
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target._schema.name.partition("::")[2]


def call_kind(node: Node) -> str | None:
    """Return the field of `StepCounts` that a call belongs to; None if it launches nothing."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return None
    results = pytree.tree_leaves(node.meta.get("val"))
    if not any(isinstance(result, Tensor) for result in results):
        return None
    if op.namespace == "_c10d_functional":
        return None if op is torch.ops._c10d_functional.wait_tensor.default else "collectives"
    if op is ONE_SHOT:
        return "collectives"
    if op in OWN:
        return "own"
    if op in OWN_PRODUCTS or call_name(node) in PRODUCTS:
        return "products"
    if op is torch.ops.aten.clone.default and node.all_input_nodes[0].op == "placeholder":
        return None  # state that is passed on
    views = any(result.alias_info is not None for result in op._schema.returns)
    return None if views else "others"


def describe_counts(counts: StepCounts) -> str:
    """Describe a step's calls for a dry run."""
    text = f"{counts.products:,} products, {counts.own:,} ops of ours, {counts.others:,} others"
    if counts.collectives:
        text += f", {counts.collectives:,} collectives of {format_size(counts.summed)}"
    if counts.one_shot:
        text += f" ({counts.one_shot:,} of them one-shot)"
    return text


def count_temporary_bytes(traced: TracedProgram) -> int:
    """Return the most bytes of results held at once; symbolic sizes count with their upper bounds.

    A result that only fused operators read is never held. A result of a state's shape is written
    over that state. The memory that our kernels hold between their launches is not counted.
    """
    ranges = traced.exported.range_constraints
    bounds = {symbol: bound.upper for symbol, bound in ranges.items()}
    nodes = list(traced.exported.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    states = {_find_shape(node.meta["val"]) for node in nodes if node.op == "placeholder"}
    readers: dict[Node, set[str | None]] = {}  # kinds of a result's readers, also through views
    last: dict[Node, int] = {}  # place of a result's last read, also through results not held
    change = [0] * (len(nodes) + 1)
    for node in reversed(nodes):
        kind = call_kind(node) if node.op == "call_function" else node.op
        is_view, kinds, end = kind is None, set[str | None](), place[node]
        for user in node.users:
            user_kind = call_kind(user) if user.op == "call_function" else user.op
            kinds |= readers[user] if user_kind is None else {user_kind}
            end = max(
                end,
                last[user]
                if user_kind is None or _is_fused(user, user_kind, readers)
                else place[user],
            )
        readers[node], last[node] = kinds, end
        if is_view or node.op != "call_function" or _is_fused(node, kind, readers):
            continue
        leaves = pytree.tree_leaves(node.meta["val"])
        results = [x for x in leaves if isinstance(x, Tensor) and _find_shape(x) not in states]
        held = sum(_count_nbytes(result, bounds) for result in results)
        change[place[node]] += held
        change[end + 1] -= held
    peak = now = 0
    for held in change:
        now += held
        peak = max(peak, now)
    return peak


def _is_fused(node: Node, kind: str | None, readers: dict[Node, set[str | None]]) -> bool:
    return kind == "others" and call_name(node) not in ALONE and readers[node] <= {"others"}


def _find_shape(value: Any) -> tuple[Any, ...]:
    return (*map(str, value.shape), value.dtype) if isinstance(value, Tensor) else ()


def _count_nbytes(value: Tensor, bounds: dict[Any, Any]) -> int:
    sizes: tuple[Any, ...] = tuple(value.shape)
    known = (
        int(size.node.expr.xreplace(bounds)) if isinstance(size, torch.SymInt) else size
        for size in sizes
    )
    return prod(known) * int(value.element_size())
