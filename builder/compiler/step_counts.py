"""Count a step's calls in its exported graph, as a compiler for a GPU would fuse them."""

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

from mtpbuild.builder.program.trace import Traced
from mtpbuild.builder.show.tables import format_size
from mtpbuild.plugins import (
    OPS,
    SUM_PARTS,
    matmul_scaled,
    matmul_wide,
    moe,
    sum_of_ranks,
    take_rows,
)

PRODUCTS = {"matmul", "mm", "bmm", "linear", "addmm", "baddbmm"}  # PyTorch's
OWN_PRODUCTS = {op._opoverload for op in (matmul_scaled, matmul_wide)}
ONE_SHOT = sum_of_ranks._opoverload
GATHERS = take_rows._opoverload  # PyTorch's operators do it on a GPU
KERNELS = {
    op._opoverload: op for op in OPS.values() if op._opoverload not in {*OWN_PRODUCTS, GATHERS}
}
SUMMED = {*OWN_PRODUCTS, moe._opoverload}  # after them PyTorch sums their parts
READERS = {op._opoverload for op in SUM_PARTS}  # unless one of these reads them
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


def count_step_calls(traced: Traced, temporary: int = 0) -> StepCounts:
    """Count the calls of an exported program; temporary: bytes of its intermediate results."""
    nodes = list(traced.exported.graph.nodes)
    kinds, counts, summed = dict[Node, str](), Counter[str](), 0
    for node in nodes:
        if node.op == "call_function" and (kind := call_kind(node)):
            kinds[node] = kind
            if kind != "others":
                counts[kind] += count_launches(node) if kind == "kernels" else 1
            if kind == "collectives":
                summed += count_bytes(node.args[0])
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
    before: dict[Node, int] = {}  # longest chain of calls before it
    fused: dict[Node, Node] = {}  # an operator -> another one of its kernel, or itself
    readers: dict[Node, list[Node]] = defaultdict(list)

    def first(node: Node) -> Node:
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
        own = before[node] = max((before[s] + (s not in fused) for s in read[node]), default=0)
        for source in read[node]:
            readers[source].append(node)
        if _is_summed(node):
            before[node] = own + 1
        elif kinds[node] != "others" or op_name(node) in ALONE:
            continue
        fused[node] = node
        for source in read[node]:
            if source in fused and before[source] == own and not _is_summed(node):
                fused[first(source)] = first(node)
    alone = sum(kind == "others" and node not in fused for node, kind in kinds.items())
    written = {
        first(node)
        for node in fused
        if op_name(node) in REDUCED
        or _is_summed(node)
        or any(reader not in fused or _is_summed(reader) for reader in readers[node])
    }
    return alone + len(written)


def _is_summed(node: Node) -> bool:
    op = node.target
    if op is matmul_scaled._opoverload and [_sums(user, node) for user in node.users] == [True]:
        return False
    return op in SUMMED


def _sums(reader: Node, product: Node) -> bool:
    op = reader.target
    return op in READERS and reader.args[0] is product


def op_name(node: Node) -> str:
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
    if op in OWN_PRODUCTS or op_name(node) in PRODUCTS:
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
    if launches is None or any(map(_is_open, node.all_input_nodes)):
        return 1
    return len(launches(*pytree.tree_map(_stand_in, tuple(node.args))).each)


def _is_open(operand: Node) -> bool:
    """Return whether a tensor has a symbolic size, so that no kernel's grid is known."""
    value = operand.meta["val"]
    return isinstance(value, Tensor) and not all(isinstance(size, int) for size in value.shape)


def count_bytes(given: Any) -> int:
    """Return a tensor's bytes; each symbolic size counts as 1."""
    value = given.meta["val"]
    return prod(n for n in value.shape if isinstance(n, int)) * int(value.element_size())


def _stand_in(arg: Any) -> Any:
    """Return a tensor of that shape without values, in int32 for bool, as kernels take flags."""
    if not isinstance(arg, Node):
        return arg
    value = arg.meta["val"]
    if not isinstance(value, Tensor):
        return value
    dtype = torch.int32 if value.dtype == torch.bool else value.dtype
    return torch.empty(tuple(value.shape), dtype=dtype, device="meta")


def describe_counts(counts: StepCounts) -> str:
    """Describe a step's calls for a dry run."""
    said = (
        f"about {counts.launches:,} launches ({counts.products:,} products, {counts.kernels:,} "
        f"kernels of ours, {counts.others:,} of other operators, fused)"
    )
    if counts.collectives:
        said += f", {counts.collectives:,} collectives of {format_size(counts.summed)}"
    if counts.one_shot:
        said += f" ({counts.one_shot:,} of them one-shot)"
    return said
