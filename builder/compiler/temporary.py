"""Estimate how many bytes of intermediate results a program holds, from its exported graph."""

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from mtpbuild.builder.compiler.step_counts import ALONE, call_kind, op_name
from mtpbuild.builder.program.trace import Traced


def temporary_bytes(traced: Traced) -> int:
    """Return the most bytes of results that are held at once; symbolic sizes have their bounds.

    A result is never held if only operators read it that a compiler fuses. A result of a state's
    shape is written over that state. Memory that our kernels hold between their launches is not
    known here.
    """
    ranges = traced.exported.range_constraints
    bounds = {symbol: found.upper for symbol, found in ranges.items()}
    nodes = list(traced.exported.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    states = {_shape(node.meta["val"]) for node in nodes if node.op == "placeholder"}
    readers: dict[Node, set[str | None]] = {}  # their kinds, through views
    last: dict[Node, int] = {}  # place of a result's last read, also through results not held
    change = [0] * (len(nodes) + 1)
    for node in reversed(nodes):
        kind = call_kind(node) if node.op == "call_function" else node.op
        through, kinds, end = kind is None, set[str | None](), place[node]
        for user in node.users:
            own = call_kind(user) if user.op == "call_function" else user.op
            kinds |= readers[user] if own is None else {own}
            end = max(end, last[user] if own is None or _fused(user, own, readers) else place[user])
        readers[node], last[node] = kinds, end
        if through or node.op != "call_function" or _fused(node, kind, readers):
            continue
        results = [each for each in pytree.tree_leaves(node.meta["val"]) if _is_tensor(each)]
        held = sum(_nbytes(each, bounds) for each in results if _shape(each) not in states)
        change[place[node]] += held
        change[end + 1] -= held
    most = now = 0
    for held in change:
        now += held
        most = max(most, now)
    return most


def _fused(node: Node, kind: str | None, readers: dict[Node, set[str | None]]) -> bool:
    return kind == "others" and op_name(node) not in ALONE and readers[node] <= {"others"}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _shape(value: Any) -> tuple[Any, ...]:
    return (*map(str, value.shape), value.dtype) if isinstance(value, Tensor) else ()


def _nbytes(value: Tensor, bounds: dict[Any, Any]) -> int:
    sizes: tuple[Any, ...] = tuple(value.shape)
    known = (
        int(size.node.expr.xreplace(bounds)) if isinstance(size, torch.SymInt) else size
        for size in sizes
    )
    return prod(known) * int(value.element_size())
