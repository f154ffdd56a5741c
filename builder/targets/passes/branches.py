"""Both sides of every branch, and a choice by value: for compilers that take no torch.cond."""

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node


def without_branches(exported: ExportedProgram) -> None:
    """Before: cond(p, yes, no, operands). After: where(p, yes(operands), no(operands)) per result.

    In place, innermost branches too. A side that is not chosen costs its computation.
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
    """Copy a branch's nodes to where `module` is being written; its results there."""
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
