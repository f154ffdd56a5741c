"""Count a program's calls and intermediate results in its exported graph.

PyTorch's operators are counted as a compiler for a GPU would fuse them.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from mtpbuild import plugins
from mtpbuild.builder.program.trace import TracedProgram
from mtpbuild.builder.show.tables import format_size

PRODUCTS = {"matmul", "mm", "bmm", "linear", "addmm", "baddbmm"}  # PyTorch's
OWN_PRODUCTS = {op._opoverload for op in (plugins.matmul_scaled, plugins.matmul_wide)}
ONE_SHOT = plugins.sum_of_ranks._opoverload
GATHERS = plugins.take_rows._opoverload  # on a GPU PyTorch's operators compute it
KERNELS = {
    op._opoverload: op
    for op in plugins.OPS.values()
    if op._opoverload not in {*OWN_PRODUCTS, GATHERS}
}
SUMMED = {*OWN_PRODUCTS, plugins.moe._opoverload}  # their result is parts, which PyTorch sums
READERS = {op._opoverload for op in plugins.SUM_PARTS}  # they sum the parts of a product themselves
ALONE = {"topk", "sort", "cumsum", "scatter"}  # operators that nothing is fused with
REDUCED = {"rms_norm", "sum", "mean", "amax", "argmax", "logsumexp", "softmax", "log_softmax"}


@dataclass(frozen=True)
class StepCounts:
    """The number of nodes of one program's graph, and how many of them are calls.

    Views and sizes are not calls. An op of ours counts once for each of its kernels. Other
    operators of PyTorch that stand together between products, kernels and collectives count as one
    (`groups`).
    """

    nodes: int
    products: int = 0
    kernels: int = 0
    others: int = 0
    collectives: int = 0
    one_shot: int = 0  # collectives by a kernel of ours
    summed: int = 0  # bytes that a rank gives to its collectives
    temporary: int = 0  # bytes of intermediate results that are held at once

    @property
    def launches(self) -> int:
        """The number of calls of one GPU without its collectives."""
        return self.products + self.kernels + self.others


def count_step_calls(traced: TracedProgram, temporary: int = 0) -> StepCounts:
    """Count the calls of an exported program; temporary: bytes of its intermediate results."""
    nodes = list(traced.exported.graph.nodes)
    kinds, counts, summed = dict[Node, str](), Counter[str](), 0
    for node in nodes:
        if node.op == "call_function" and (kind := call_kind(node)):
            kinds[node] = kind
            if kind != "others":
                counts[kind] += count_launches(node) if kind == "kernels" else 1
            if kind == "collectives":
                given = node.args[0].meta["val"]  # each symbolic size counts as 1
                summed += prod(n for n in given.shape if isinstance(n, int)) * given.element_size()
                counts["one_shot"] += node.target is ONE_SHOT
    counts["others"] = count_fused_kernels(nodes, kinds)
    return StepCounts(len(nodes), **counts, summed=summed, temporary=temporary)


def count_fused_kernels(nodes: Iterable[Node], kinds: dict[Node, str]) -> int:
    """Count the kernels that PyTorch's other operators become.

    These are AOTInductor's rules, as far as they matter here. Two operators are one kernel if one
    reads the other, also through views, and equally many calls come before both. An operator
    without a reduction that only other operators read is computed again in their kernels, and does
    not count. `tests/builder/test_cross_cuda.py` compares the sum with compiled programs.
    """
    read: dict[Node, list[Node]] = {}  # what a node reads, without the views between
    depth: dict[Node, int] = {}  # longest chain of calls before a node
    fused: dict[Node, Node] = {}  # an operator -> another one of its kernel, or itself (union-find)
    readers: dict[Node, list[Node]] = defaultdict(list)

    def find_kernel(node: Node) -> Node:
        while fused[node] is not node:
            node = fused[node]
        return node

    for node in nodes:
        sources = [s for n in node.all_input_nodes for s in ([n] if n in kinds else read[n])]
        read[node] = list(dict.fromkeys(sources))
        if node not in kinds:
            if node.op == "output":
                for source in read[node]:
                    readers[source].append(node)
            continue
        own = depth[node] = max((depth[s] + (s not in fused) for s in read[node]), default=0)
        for source in read[node]:
            readers[source].append(node)
        if _is_summed(node):
            depth[node] = own + 1
        elif kinds[node] != "others" or call_name(node) in ALONE:
            continue
        fused[node] = node
        for source in read[node]:
            if source in fused and depth[source] == own and not _is_summed(node):
                fused[find_kernel(source)] = find_kernel(node)
    alone = sum(kind == "others" and node not in fused for node, kind in kinds.items())
    written = {
        find_kernel(node)
        for node in fused
        if call_name(node) in REDUCED
        or _is_summed(node)
        or any(reader not in fused or _is_summed(reader) for reader in readers[node])
    }
    return alone + len(written)


def _is_summed(node: Node) -> bool:
    """Return whether PyTorch sums the parts of an op's result, because no op of ours does."""
    op, by_ours = node.target, [_sums_parts(user, node) for user in node.users]
    return op in SUMMED and not (op is plugins.matmul_scaled._opoverload and by_ours == [True])


def _sums_parts(node: Node, product: Node) -> bool:
    return node.target in READERS and node.args[0] is product


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
    if op in KERNELS:
        return "kernels"
    if op in OWN_PRODUCTS or call_name(node) in PRODUCTS:
        return "products"
    if op is torch.ops.aten.clone.default and node.all_input_nodes[0].op == "placeholder":
        return None  # state that is passed on
    views = any(result.alias_info is not None for result in op._schema.returns)
    return None if views else "others"


def count_launches(node: Node) -> int:
    """Return how many kernels an op of ours launches; 1 if that is unknown.

    It is unknown without Triton, and for tensors of symbolic sizes.
    """
    assert isinstance(node.target, torch._ops.OpOverload)
    op = KERNELS[node.target]
    name, folder = op._qualname.rpartition("::")[2], op._init_fn.__module__.rpartition(".")[0]
    if find_spec("triton") is None or find_spec(kernels := f"{folder}.triton") is None:
        return 1
    launches = getattr(import_module(kernels), f"{name}_launches", None)
    operands = (operand.meta["val"] for operand in node.all_input_nodes)
    sizes = (size for value in operands if isinstance(value, Tensor) for size in value.shape)
    if launches is None or not all(isinstance(size, int) for size in sizes):
        return 1
    return len(launches(*pytree.tree_map(_make_stand_in, tuple(node.args))).each)


def _make_stand_in(arg: Any) -> Any:
    """Return a meta tensor in place of a tensor; bool becomes int32, the type of kernels' flags."""
    if not isinstance(arg, Node):
        return arg
    value = arg.meta["val"]
    if not isinstance(value, Tensor):
        return value
    dtype = torch.int32 if value.dtype == torch.bool else value.dtype
    return torch.empty(tuple(value.shape), dtype=dtype, device="meta")


def describe_counts(counts: StepCounts) -> str:
    """Describe a step's calls for a dry run."""
    text = (
        f"about {counts.launches:,} launches ({counts.products:,} products, {counts.kernels:,} "
        f"kernels of ours, {counts.others:,} of other operators, fused)"
    )
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
    bounds = {symbol: found.upper for symbol, found in ranges.items()}
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
            own = call_kind(user) if user.op == "call_function" else user.op
            kinds |= readers[user] if own is None else {own}
            end = max(
                end, last[user] if own is None or _is_fused(user, own, readers) else place[user]
            )
        readers[node], last[node] = kinds, end
        if is_view or node.op != "call_function" or _is_fused(node, kind, readers):
            continue
        leaves = pytree.tree_leaves(node.meta["val"])
        results = [x for x in leaves if isinstance(x, Tensor) and _find_shape(x) not in states]
        held = sum(_count_nbytes(result, bounds) for result in results)
        change[place[node]] += held
        change[end + 1] -= held
    most = now = 0
    for held in change:
        now += held
        most = max(most, now)
    return most


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
