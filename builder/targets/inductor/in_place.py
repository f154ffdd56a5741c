"""Make a program for AOTInductor update its state in place."""

import operator
from typing import TYPE_CHECKING

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from mtpbuild.builder.targets.inductor.gpu_passes import name_op
from mtpbuild.plugins import IN_PLACE

if TYPE_CHECKING:
    from mtpbuild.builder.program.trace import TracedProgram


def update_in_place(exported: ExportedProgram, traced: "TracedProgram") -> GraphModule:
    """Before: state and outputs are returned. After: outputs are, and state is updated in place.

    A state tensor that the program passes on unchanged is not written.
    """
    program = exported.module(check_guards=False)
    assert isinstance(program, GraphModule)
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    state = {spec.name: node for spec, node in zip(traced.inputs, inputs, strict=True)}
    end = program.graph.output_node()
    for node in [node for node in program.graph.nodes if name_op(node) in IN_PLACE]:
        _write_into_operand(program, node)
    results = pytree.tree_leaves(end.args[0])
    outputs: list[Node] = []
    with program.graph.inserting_before(end):
        for spec, value in zip(traced.outputs, results, strict=True):
            if not spec.name.endswith(".out"):
                outputs.append(value)
                continue
            old = state[spec.name.removesuffix(".out")]
            if value is old:
                continue
            if value.target is torch.ops.aten.clone.default and value.args[0] is old:
                continue
            program.graph.call_function(torch.ops.aten.copy_.default, (old, value))
    end.args = (tuple(outputs),)
    program.graph.set_codegen(CodeGen())  # plain arguments in the order of the manifest
    updated = GraphModule(program, program.graph)
    updated.meta["exported"] = exported  # with the constants and example inputs
    return updated


def _write_into_operand(program: GraphModule, node: Node) -> None:
    """Before: an op returns an operand's new value. After: another op writes it in place."""
    name, operand, result = IN_PLACE[name_op(node)]
    written = node.args[operand]
    assert isinstance(written, Node)
    readers = [user for user in written.users if isinstance(user.meta.get("val"), torch.Tensor)]
    assert readers in ([], [node]), "nobody reads what stood there before, but for its sizes"
    namespace, _, leaf = name.partition("::")
    with program.graph.inserting_before(node):
        op = getattr(getattr(torch.ops, namespace), leaf).default
        into = program.graph.call_function(op, node.args, node.kwargs)
    for user in list(node.users):
        assert user.target is operator.getitem
        if user.args[1] == result:
            user.replace_all_uses_with(written)
            program.graph.erase_node(user)
        else:
            user.replace_input_with(node, into)
    program.graph.erase_node(node)
