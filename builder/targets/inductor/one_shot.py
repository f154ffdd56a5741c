"""Replace small sums between ranks by a kernel that reads other GPUs' memory."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Node
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from mtpbuild.plugins import sum_of_ranks
from mtpbuild.runtime.contract.sums import MOST, PEERS

if TYPE_CHECKING:
    from mtpbuild.builder.program.trace import TracedProgram

FUNCTIONAL = torch.ops._c10d_functional
FLOATS = (torch.bfloat16, torch.float32)


def sum_through_shared_memory(
    exported: ExportedProgram, traced: "TracedProgram"
) -> ExportedProgram:
    """Before: all_reduce and its wait. After: `sum_of_ranks`, for sums of `MOST` bytes or less.

    A new parameter holds the addresses of the other ranks' memory, which each rank fills in at
    load.
    """
    plan = traced.plan
    ranks, slots = plan.ranks.tp, None if traced.of_prompt else plan.max_batch
    graph, peers = exported.graph_module.graph, None
    for node in list(graph.nodes):
        if node.target is not FUNCTIONAL.all_reduce.default:
            continue
        if not fits(node.args[0].meta["val"], exported, slots):
            continue
        peers = peers or add_parameter(exported, PEERS, torch.zeros(ranks + 1, dtype=torch.int64))
        (wait,) = node.users
        operands = node.args[0], peers
        with graph.inserting_before(node):
            total = graph.call_function(sum_of_ranks._opoverload, operands)
        total.meta["val"] = sum_of_ranks._opoverload(*(operand.meta["val"] for operand in operands))
        wait.replace_all_uses_with(total)
        graph.erase_node(wait)
        graph.erase_node(node)
    exported.graph_module.recompile()
    return exported


def fits(value: Tensor, exported: ExportedProgram, slots: int | None) -> bool:
    """Return whether the kernel can sum the tensor, even with the most slots or tokens."""
    size: Any = value.numel()
    if isinstance(size, torch.SymInt):
        ranges = exported.range_constraints
        if slots is not None:  # the traced range is larger
            ranges = {s: ValueRanges(1, min(r.upper, slots)) for s, r in ranges.items()}
        size = bound_sympy(size.node.expr, ranges).upper
    return value.dtype in FLOATS and bool(size * value.element_size() <= MOST)


def add_parameter(exported: ExportedProgram, name: str, value: Tensor) -> Node:
    """Add a parameter of the model to an exported program, in place; return its node."""
    graph, full = exported.graph_module.graph, f"model.{name}"
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        node = graph.placeholder(f"p_model_{name}")
    mode = first.meta["val"].fake_mode
    node.meta["val"] = mode.from_tensor(value, static_shapes=True)
    spec = InputSpec(InputKind.PARAMETER, TensorArgument(node.name), full)
    exported.graph_signature.input_specs.insert(0, spec)
    exported.state_dict[full] = nn.Parameter(value, requires_grad=False)
    return node
