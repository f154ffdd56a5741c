"""What a step costs in calls, counted in its exported graph before anything is fused."""

from collections import Counter
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
from mtpbuild.plugins import FACETS, file_of, matmul_scaled, matmul_wide, moe

PRODUCTS = {"matmul", "mm", "bmm", "linear", "addmm", "baddbmm"}  # PyTorch's
OWN_PRODUCTS = {op._opoverload for op in (matmul_scaled, matmul_wide)}
KERNELS = {op._opoverload: op for op in FACETS if op._opoverload not in OWN_PRODUCTS}


class OpenSizeError(Exception):
    """A kernel's grid is not known before its operands' sizes are."""


@dataclass(frozen=True)
class Counts:
    """Of one program: the graph's nodes, and what of them is a call.

    Views and sizes are none. Each operator of PyTorch counts as a launch, so that there are at most
    so many: compilers fuse those that stand between products. An op of ours counts as many as it
    has kernels.
    """

    nodes: int
    products: int = 0
    kernels: int = 0
    others: int = 0
    collectives: int = 0
    summed: int = 0  # bytes that a rank gives to its collectives

    @property
    def launches(self) -> int:
        """All calls of one GPU, the collectives apart."""
        return self.products + self.kernels + self.others


def counted(traced: Traced) -> Counts:
    """Count the calls of an exported program."""
    nodes = list(traced.exported.graph.nodes)
    kinds, summed = Counter[str](), 0
    for node in nodes:
        if node.op == "call_function" and (kind := kind_of(node)):
            kinds[kind] += launches_of(node) if kind == "kernels" else 1
            if kind == "collectives":
                summed += nbytes(node.args[0])
    return Counts(len(nodes), **kinds, summed=summed)


def kind_of(node: Node) -> str | None:
    """The field of `Counts` that a call belongs to; None: it launches nothing."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return None
    results = pytree.tree_leaves(node.meta.get("val"))
    if not any(isinstance(result, Tensor) for result in results):
        return None
    if op.namespace == "_c10d_functional":
        return None if op is torch.ops._c10d_functional.wait_tensor.default else "collectives"
    if op in KERNELS:
        return "kernels"
    if op in OWN_PRODUCTS or op._schema.name.partition("::")[2] in PRODUCTS:
        return "products"
    views = any(result.alias_info is not None for result in op._schema.returns)
    return None if views else "others"


def launches_of(node: Node) -> int:
    """How many kernels one of our ops is, where Triton is here to tell; else one."""
    assert isinstance(node.target, torch._ops.OpOverload)
    op = KERNELS[node.target]
    if not {file_of(op, "gpu"), file_of(op, "tensorrt")} & {"triton", "plugins"}:
        return 1
    if find_spec("triton") is None:
        return 1
    name, folder = op._qualname.rpartition("::")[2], op._init_fn.__module__.rpartition(".")[0]
    launches = getattr(import_module(f"{folder}.triton"), f"{name}_launches")
    try:
        made = launches(*pytree.tree_map(_stand_in, tuple(node.args)))
    except OpenSizeError:
        return 1
    return len(made.each) + (op is moe)  # and the sum over a token's experts


def nbytes(given: Any) -> int:
    """Of a tensor, with one for each size that is open."""
    value = given.meta["val"]
    return prod(n for n in value.shape if isinstance(n, int)) * int(value.element_size())


def _stand_in(arg: Any) -> Any:
    """A tensor of that shape without values; int32 for bool, as kernels take flags."""
    if not isinstance(arg, Node):
        return arg
    value = arg.meta["val"]
    if not isinstance(value, Tensor):
        return value
    dtype = torch.int32 if value.dtype == torch.bool else value.dtype
    if not all(isinstance(size, int) for size in value.shape):
        raise OpenSizeError
    return torch.empty(tuple(value.shape), dtype=dtype, device="meta")


def in_bytes(size: int) -> str:
    """A number of bytes in the largest unit that it has one of."""
    units = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
    name, unit = next((u for u in units if size >= u[1]), ("bytes", 1))
    return f"{size:,} bytes" if unit == 1 else f"{size / unit:,.2f} {name}"


def in_words(counts: Counts) -> str:
    """A step's calls, for a dry run."""
    said = (
        f"at most {counts.launches:,} launches ({counts.products:,} products, {counts.kernels:,} "
        f"kernels of ours, {counts.others:,} other operators, before they are fused)"
    )
    if counts.collectives:
        said += f", {counts.collectives:,} collectives of {in_bytes(counts.summed)}"
    return said
