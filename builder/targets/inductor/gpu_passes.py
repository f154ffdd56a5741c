"""Prepare a traced program for AOTInductor on a GPU: no branches, on the device, with kernels."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from mtpbuild import plugins

if TYPE_CHECKING:
    from mtpbuild.builder.program.trace import TracedProgram


NAMESPACE = "mtpbuild_triton::"
DEVICE = "cuda:0"  # with a number, as PyTorch's checks of tensors distinguish cuda from cuda:0


def compute_both_branches(exported: ExportedProgram, traced: "TracedProgram") -> ExportedProgram:
    """Before: cond(p, yes, no, operands). After: where(p, yes(operands), no(operands)) per result.

    A branch would be decided on the host, which a CUDA graph can't ask. Nested branches are
    replaced, too. The side that is not chosen is computed as well.
    """
    _inline_branches(exported.graph_module)
    exported.graph_module.recompile()
    return exported


def move_to_gpu(exported: ExportedProgram, traced: "TracedProgram") -> ExportedProgram:
    """Before: all tensors are on the CPU. After: on the GPU. This modifies the given program."""
    return move_to_device_pass(exported, DEVICE)


def launch_kernels(exported: ExportedProgram, traced: "TracedProgram") -> ExportedProgram:
    """Before: ops that have Triton kernels. After: their launches."""
    ops = traced.plan.style.pipeline.ops
    table = {name: file for name, file in ops.items() if file == "triton"}
    return exported.run_decompositions(plugins.facets(table))


def sum_parts_in_readers(exported: ExportedProgram, traced: "TracedProgram") -> ExportedProgram:
    """Before: one of our kernels alone reads a product. After: it sums the product's parts."""
    readers = {NAMESPACE + op._qualname.rpartition("::")[2] for op in plugins.SUM_PARTS}
    graph = exported.graph_module.graph
    for node in graph.nodes:
        product = node.args[0] if name_op(node) in readers else None
        if not isinstance(product, Node) or len(product.users) > 1:
            continue
        if (op := _find_product_in_parts(product)) is None:
            continue
        with graph.inserting_before(product):
            parts = graph.call_function(op, product.args, product.kwargs)
            parts.meta["val"] = op(*pytree.tree_map(_find_value, product.args))
        node.replace_input_with(product, parts)
        graph.erase_node(product)
    return exported


def _find_product_in_parts(product: Node) -> Any:
    """Return the op that computes a product in parts, or None if there is none."""
    from mtpbuild.plugins.matmul_scaled.op import MAX_TOKENS

    ours: Any = torch.ops.mtpbuild_triton
    if name_op(product) == NAMESPACE + "matmul_scaled":
        return ours.matmul_scaled_parts.default
    if name_op(product) != "aten::matmul":
        return None
    x, weight = map(_find_value, product.args)
    tokens = math.prod(x.shape[:-1])
    few = isinstance(x.shape[-2], int) and not (isinstance(tokens, int) and tokens > MAX_TOKENS)
    return ours.matmul_parts.default if few and weight.dim() == 2 else None


def _find_value(arg: Any) -> Any:
    return arg.meta["val"] if isinstance(arg, Node) else arg


def name_op(node: Node) -> str:
    """Return the name of the operator that a node calls, or an empty string."""
    op = node.target
    return op._schema.name if isinstance(op, torch._ops.OpOverload) else ""


def _inline_branches(module: GraphModule) -> None:
    for node in list(module.graph.nodes):
        if node.target is not torch.ops.higher_order.cond:
            continue
        predicate, yes, no, operands = node.args
        with module.graph.inserting_before(node):
            sides = [_inline(module, side, operands) for side in (yes, no)]
            results = [_insert_where(module, predicate, *pair) for pair in zip(*sides, strict=True)]
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
    _inline_branches(branch)
    copies: dict[Node, Node] = {}
    arguments = iter(operands)
    for node in branch.graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(arguments)
        elif node.op == "output":
            return [copies[result] for result in node.args[0]]
        else:
            copies[node] = module.graph.node_copy(node, copies.__getitem__)
    raise AssertionError("a graph ends with its output")


def _insert_where(module: GraphModule, predicate: Node, yes: Node, no: Node) -> Node:
    chosen = module.graph.call_function(torch.ops.aten.where.self, (predicate, yes, no))
    chosen.meta["val"] = yes.meta["val"]
    return chosen
