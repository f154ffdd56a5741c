"""Prepares a traced program for AOTInductor on a GPU: no branches, on the device, with kernels."""

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from mtpbuild import plugins

# For a GPU, AOTInductor's graphs launch our kernels instead of ops. Grouped attention, the delta
# rule and ops for CPUs do not occur. kv_write stays PyTorch's, as the operand of a kernel would be
# copied.
GPU: plugins.FacetTable = dict.fromkeys(
    (
        plugins.accept_best,
        plugins.accept_mixed_op,
        plugins.accept_rewind,
        plugins.best_of_blocks,
        plugins.choose_rows,
        plugins.gated_product,
        plugins.matmul_scaled,
        plugins.matmul_wide,
        plugins.mla_attention,
        plugins.mla_queries,
        plugins.mla_rows,
        plugins.mla_rows_write,
        plugins.mla_values,
        plugins.moe,
        plugins.moe_route,
        plugins.rotary_rows,
        plugins.shaped_probs_op,
        plugins.sum_of_ranks,
    ),
    "triton",
) | dict.fromkeys((plugins.index_keys, plugins.take_rows), "op")


def for_gpu(exported: ExportedProgram, device: str = "cuda:0") -> ExportedProgram:
    """Before: ops and torch.cond on the CPU. After: Triton launches, both sides of a branch.

    The host would decide a branch, and a CUDA graph can't ask the host. The device has a number, as
    PyTorch's checks of tensors tell cuda and cuda:0 apart. `exported` can't be used afterwards.
    """
    without_branches(exported)
    lowered = move_to_device_pass(exported, device).run_decompositions(plugins.facets(GPU))
    products_in_parts(lowered)
    return lowered


def products_in_parts(exported: ExportedProgram) -> None:
    """Before: a kernel reads a product whose parts were summed. After: the kernel sums them.

    Works in place.
    """
    own = "mtpbuild_triton::"
    readers = {own + op._qualname.rpartition("::")[2] for op in plugins.SUM_PARTS}
    graph = exported.graph_module.graph
    for node in graph.nodes:
        product = node.args[0] if op_name(node) in readers else None
        if not isinstance(product, Node) or op_name(product) != own + "matmul_scaled":
            continue
        if len(product.users) > 1:
            continue
        with graph.inserting_before(product):
            op = torch.ops.mtpbuild_triton.matmul_scaled_parts.default
            parts = graph.call_function(op, product.args, product.kwargs)
            parts.meta["val"] = op(*pytree.tree_map(_value, product.args))
        node.replace_input_with(product, parts)
        graph.erase_node(product)


def _value(arg: Any) -> Any:
    return arg.meta["val"] if isinstance(arg, Node) else arg


def op_name(node: Node) -> str:
    """Return the name of the operator that a node calls, or an empty string."""
    op = node.target
    return op._schema.name if isinstance(op, torch._ops.OpOverload) else ""


def without_branches(exported: ExportedProgram) -> None:
    """Before: cond(p, yes, no, operands). After: where(p, yes(operands), no(operands)) per result.

    Works in place, on nested branches too. The side that is not chosen is computed as well.
    """
    _flatten(exported.graph_module)
    exported.graph_module.recompile()


def _flatten(module: GraphModule) -> None:
    for node in list(module.graph.nodes):
        if node.target is not torch.ops.higher_order.cond:
            continue
        predicate, yes, no, operands = node.args
        with module.graph.inserting_before(node):
            sides = [_inline(module, side, operands) for side in (yes, no)]
            results = [_where(module, predicate, *pair) for pair in zip(*sides, strict=True)]
        for user in list(node.users):
            assert user.op == "call_function", "a result of cond is taken out by getitem"
            user.replace_all_uses_with(results[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)
        for side in (yes, no):
            if not side.users:
                module.graph.erase_node(side)
    module.graph.lint()


def _inline(module: GraphModule, side: Node, operands: tuple[Node, ...]) -> list[Node]:
    """Copy a branch's nodes to the insertion point of `module`; return the copied results."""
    branch = getattr(module, str(side.target))
    _flatten(branch)
    there: dict[Node, Node] = {}
    given = iter(operands)
    for node in branch.graph.nodes:
        if node.op == "placeholder":
            there[node] = next(given)
        elif node.op == "output":
            return [there[result] for result in node.args[0]]
        else:
            there[node] = module.graph.node_copy(node, there.__getitem__)
    raise AssertionError("a graph ends with its output")


def _where(module: GraphModule, predicate: Node, yes: Node, no: Node) -> Node:
    chosen = module.graph.call_function(torch.ops.aten.where.self, (predicate, yes, no))
    chosen.meta["val"] = yes.meta["val"]
    return chosen
