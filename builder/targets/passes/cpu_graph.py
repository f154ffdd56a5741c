"""Puts what stands around products into them, in graphs for the CPU's library of kernels.

The numbers stay as they are to the bit: an operator does the same arithmetic in the same order.
"""

import onnx_ir as ir

from mtpbuild.runtime.cpu_library import DOMAIN

# The place of the operand that is the weight of a norm which the rows go through first, and of the
# one that is added to the result.
NORM = {"Product": 3, "GatedProduct": 3, "FloatProduct": 2, "GatedFloatProduct": 2}
SUM = {"Product": 4, "FloatProduct": 3, "Experts": 7, "FloatExperts": 5}
BIASED = ("Product", "FloatProduct")  # which also add one number to each output


class FuseAround(ir.passes.InPlacePass):  # type: ignore[misc]
    """Removes a norm that only products read, and a sum of which a product is one side.

    A step's delta rule loses the state behind all tokens, which only a prompt's keeps.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [*model.graph]
        fused = [node for node in nodes if _fuse_norm(node) or _fuse_sum(node)]
        model.graph.remove(fused, safe=True)
        changed = [node for node in model.graph if _drop_state(node)]
        return ir.passes.PassResult(model, bool(fused or changed))


def _drop_state(node: ir.Node) -> bool:
    if (node.domain, node.op_type) != (DOMAIN, "DeltaRule"):
        return False
    state = node.outputs[1]
    if state.is_graph_output() or state.uses():
        return False
    node.attributes["keeps"], state.name = ir.AttrInt64("keeps", 0), ""
    return True


def _fuse_norm(node: ir.Node) -> bool:
    if (node.domain, node.op_type) != (DOMAIN, "Norm"):
        return False
    readers = [*node.outputs[0].uses()]
    if node.outputs[0].is_graph_output() or not all(
        use.node.domain == DOMAIN and use.node.op_type in NORM and use.idx == 0 for use in readers
    ):
        return False
    for use in readers:
        use.node.replace_input_with(0, node.inputs[0])
        _put(use.node, NORM[use.node.op_type], node.inputs[1])
        use.node.attributes["epsilon"] = node.attributes["epsilon"]
    return True


def _fuse_sum(node: ir.Node) -> bool:
    if (node.domain, node.op_type) != ("", "Add") or node.outputs[0].is_graph_output():
        return False
    for own, other in (node.inputs, node.inputs[::-1]):
        if own is None or other is None or not _addable(own, other):
            continue
        product = own.producer()
        assert product is not None
        _put(product, SUM[product.op_type], other)
        node.graph.remove(product)  # what is added may be computed behind it
        node.graph.insert_before(node, product)
        node.outputs[0].replace_all_uses_with(own)
        return True
    return False


def _addable(own: ir.Value, other: ir.Value) -> bool:
    """Tell whether `own` is a product's result that is read once, and `other` fits."""
    product = own.producer()
    if product is None or product.domain != DOMAIN or product.op_type not in SUM:
        return False
    place = SUM[product.op_type]
    taken = len(product.inputs) > place and product.inputs[place] is not None
    alone = len([*own.uses()]) == 1 and not own.is_graph_output()
    known = own.shape is not None and None not in [*map(_size, own.shape)]
    bias = product.op_type in BIASED and other.shape is not None and own.shape is not None
    like = own.shape == other.shape or (bias and [*other.shape] == [own.shape[-1]])
    return alone and not taken and known and like


def _size(size: int | ir.SymbolicDim) -> int | str | None:
    return size if isinstance(size, int) else size.value


def _put(node: ir.Node, place: int, value: ir.Value | None) -> None:
    """Make a value the operand of that place; places before it that nothing has stay empty."""
    if len(node.inputs) <= place:
        node.resize_inputs(place + 1)
    node.replace_input_with(place, value)
