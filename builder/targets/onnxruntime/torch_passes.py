"""Prepare a traced program for torch.onnx."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

if TYPE_CHECKING:
    from mtpbuild.builder.program.trace import TracedProgram

aten = torch.ops.aten
Rewrite = Callable[[Node], tuple[tuple[Any, ...], dict[str, Any]]]


def _reshape(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the `reshape` that is equal to a node.

    `reshape` infers the last size that varies (-1). Other varying sizes are arguments of
    `unflatten`, or read from the operand.
    """
    operand, sizes = node.args[0], [*node.meta["val"].shape]
    assert isinstance(operand, Node)
    operand_sizes = [*operand.meta["val"].shape]
    varying = [axis for axis, size in enumerate(sizes) if not isinstance(size, int)]
    given = dict[int, Node]()
    if node.target is aten.unflatten.int:
        _, first, parts = node.args
        assert isinstance(first, int)
        assert isinstance(parts, list)
        places = enumerate(parts, first % len(operand_sizes))
        given = {axis: size for axis, size in places if isinstance(size, Node)}
    for axis in varying[:-1]:
        if axis in given:
            sizes[axis] = given[axis]
            continue
        with node.graph.inserting_before(node):
            operands = operand, operand_sizes.index(sizes[axis])
            size = node.graph.call_function(aten.sym_size.int, operands)
        size.meta["val"], sizes[axis] = sizes[axis], size
    for axis in varying[-1:]:
        sizes[axis] = -1
    return (operand, sizes), {}


def _make_topk_arguments(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the `topk` that is equal to a stable sort of the last axis.

    ONNX's TopK is stable: among equal values it takes the lowest index first.
    """
    (operand,), settings = node.args, {"dim": -1, "descending": False, **node.kwargs}
    assert isinstance(operand, Node)
    size = operand.meta["val"].shape[-1]
    assert isinstance(size, int)
    assert settings["dim"] in (-1, operand.meta["val"].dim() - 1)
    return (operand, size, -1, settings["descending"], True), {}


# Operators that torch.onnx supports only decomposed, or exports badly -> our replacements.
REWRITES: dict[Any, tuple[Any, Rewrite]] = {
    aten.__and__.Tensor: (aten.bitwise_and.Tensor, lambda node: (node.args, {})),
    aten.__or__.Tensor: (aten.bitwise_or.Tensor, lambda node: (node.args, {})),
    aten.mT.default: (aten.transpose.int, lambda node: ((node.args[0], -2, -1), {})),
    aten.to.dtype: (aten._to_copy.default, lambda node: (node.args[:1], {"dtype": node.args[1]})),
    aten.flatten.using_ints: (aten.reshape.default, _reshape),
    aten.unflatten.int: (aten.reshape.default, _reshape),
    aten.sort.stable: (aten.topk.default, _make_topk_arguments),
}


def write_plainly(exported: ExportedProgram, traced: "TracedProgram") -> ExportedProgram:
    """Apply `REWRITES`, in branches too; the export fails at other operators of the kind."""
    for graph in exported.graph_module.modules():
        assert isinstance(graph, GraphModule)
        for node in graph.graph.nodes:
            if node.target in REWRITES:
                target, rewrite = REWRITES[node.target]
                node.args, node.kwargs = rewrite(node)
                node.target = target
        graph.recompile()
    return exported
