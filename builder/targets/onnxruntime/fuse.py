"""Fuse neighbouring nodes into our operators, in graphs for the CPU's library of kernels.

Norms, sums and states stay bit-identical: a fused operator does the same arithmetic in the same
order. Gates become the library's own silu and sigmoid.
"""

from typing import TYPE_CHECKING

import onnx_ir as ir
from onnx_ir.passes import common

from mtpbuild.runtime.cpu_library import DOMAIN

if TYPE_CHECKING:
    from mtpbuild.builder.program.trace import TracedProgram

# Operator -> index of an optional input.
NORM = {"Product": 3, "GatedProduct": 3}  # the weight of a norm of the operand
SUM = {"Product": 4, "Experts": 7}  # a tensor to add to the result
BIASED = ("Product",)  # operators to whose result a bias, one number per output, may be added

# Operator -> indices of the inputs for a recurrent state and for the slots that start from zeros.
STATES = {
    "CausalConv": (1, 3),
    "LastInputs": (0, 3),
    "DeltaRule": (4, 5),
    "DeltaAdvance": (4, 6),
}


def fuse_neighbours(model: ir.Model, traced: "TracedProgram | None" = None) -> ir.Model:
    """Fuse norms, sums and zeroed states into the operators beside them.

    In a decode step the delta rule drops its output of the state after all tokens, which only
    prefill reads. Gates and splits between our operators become ours, so that a chain continues
    through them.
    """
    fused = []
    for node in [*model.graph]:
        fuse = FUSIONS.get((node.domain, node.op_type))
        is_inner = not any(value.is_graph_output() for value in node.outputs)
        if fuse is not None and is_inner and fuse(node):
            fused.append(node)
    model.graph.remove(fused, safe=True)
    for node in model.graph:
        _drop_state(node)
    common.RemoveUnusedNodesPass()(model)
    return model


def _drop_state(node: ir.Node) -> None:
    """Drop a delta rule's second output, the state after all tokens, if nothing reads it."""
    if (node.domain, node.op_type) != (DOMAIN, "DeltaRule"):
        return
    state = node.outputs[1]
    if not state.is_graph_output() and not state.uses():
        node.attributes["keeps"], state.name = ir.AttrInt64("keeps", 0), ""


def _fuse_norm(node: ir.Node) -> bool:
    readers = [*node.outputs[0].uses()]
    if not all(
        use.node.domain == DOMAIN and use.node.op_type in NORM and use.idx == 0 for use in readers
    ):
        return False
    for use in readers:
        use.node.replace_input_with(0, node.inputs[0])
        _set_input(use.node, NORM[use.node.op_type], node.inputs[1])
        use.node.attributes["epsilon"] = node.attributes["epsilon"]
    return True


def _fuse_zeros(node: ir.Node) -> bool:
    """Pass the mask of starting slots to the readers of a state, instead of writing zeros."""
    shaped, zeros, state = node.inputs
    assert shaped is not None
    reshape, readers = shaped.producer(), [*node.outputs[0].uses()]
    if reshape is None or reshape.op_type != "Reshape" or not _is_zero(zeros):
        return False
    starts = reshape.inputs[0]
    if starts is None or starts.shape is None or len(starts.shape) != 1 or shaped.shape is None:
        return False
    # One flag per slot, broadcast over the state.
    if [*shaped.shape[1:]] != [1] * (len(shaped.shape) - 1):
        return False
    for use in readers:
        if use.node.domain != DOMAIN or STATES.get(use.node.op_type, (None,))[0] != use.idx:
            return False
    for use in readers:
        use.node.replace_input_with(use.idx, state)
        _set_input(use.node, STATES[use.node.op_type][1], starts)
    return True


def _is_zero(value: ir.Value | None) -> bool:
    held = None if value is None else value.const_value
    return held is not None and held.size == 1 and not held.numpy().any()


def _fuse_gate(node: ir.Node) -> bool:
    """Replace x * sigmoid(z), or x * (z * sigmoid(z)), by one operator."""
    if _find_gate(node.outputs[0]):
        return False
    for x, gate in (node.inputs, node.inputs[::-1]):
        gated = _find_gate(gate)
        if (
            x is None
            or gate is None
            or gated is None
            or _find_gate(x)
            or not _have_same_shape(x, gate)
        ):
            continue
        z, silu = gated
        reshape = x.producer()
        if reshape is not None and (reshape.domain, reshape.op_type) == ("", "Reshape"):
            x = reshape.inputs[0]
        _replace(node, ir.node("Gate", [x, z], {"silu": int(silu)}, domain=DOMAIN))
        return True
    return False


def _find_gate(value: ir.Value | None) -> tuple[ir.Value, bool] | None:
    """Return z and False if a value is sigmoid(z), z and True if it is silu(z), or else None."""
    node = None if value is None else value.producer()
    if node is None or node.domain != "":
        return None
    if node.op_type == "Sigmoid" and node.inputs[0] is not None:
        return node.inputs[0], False
    if node.op_type != "Mul":
        return None
    for z, other in (node.inputs, node.inputs[::-1]):
        inner = None if other is None else other.producer()
        sigmoid = inner is not None and inner.op_type == "Sigmoid" and inner.inputs[0] is z
        if sigmoid and z is not None:
            return z, True
    return None


def _fuse_split(node: ir.Node) -> bool:
    if len(node.outputs) != 2:
        return False
    x, shape = node.inputs[0], node.outputs[0].shape
    if x is None or x.shape is None or shape is None or x.dtype != ir.DataType.FLOAT:
        return False
    first, last = shape[-1], len(x.shape) - 1
    if node.attributes.get_int("axis", 0) % len(x.shape) != last or not isinstance(first, int):
        return False
    _replace(node, ir.node("Split", [x], {"first": first}, domain=DOMAIN, num_outputs=2))
    return True


def _replace(old: ir.Node, new: ir.Node) -> None:
    old.graph.insert_before(old, new)
    for before, after in zip(old.outputs, new.outputs, strict=True):
        after.name, after.type, after.shape = before.name, before.type, before.shape
        before.replace_all_uses_with(after)


def _have_same_shape(a: ir.Value, b: ir.Value) -> bool:
    """Return whether both values are fp32 of the same known shape."""
    known = a.shape is not None and None not in [*map(_read_size, a.shape)]
    return known and a.shape == b.shape and a.dtype == ir.DataType.FLOAT == b.dtype


def _fuse_sum(node: ir.Node) -> bool:
    for addend, other in (node.inputs, node.inputs[::-1]):
        if addend is None or other is None or not _can_add(addend, other):
            continue
        product = addend.producer()
        assert product is not None
        _set_input(product, SUM[product.op_type], other)
        node.graph.remove(product)  # move it, as the summand may be computed after it
        node.graph.insert_before(node, product)
        node.outputs[0].replace_all_uses_with(addend)
        return True
    return False


def _can_add(addend: ir.Value, other: ir.Value) -> bool:
    """Return whether `addend` is a product's result, read once, into which `other` can be fused."""
    product = addend.producer()
    if product is None or product.domain != DOMAIN or product.op_type not in SUM:
        return False
    index = SUM[product.op_type]
    taken = len(product.inputs) > index and product.inputs[index] is not None
    read_once = len([*addend.uses()]) == 1 and not addend.is_graph_output()
    known = addend.shape is not None and None not in [*map(_read_size, addend.shape)]
    may_be_bias = product.op_type in BIASED and other.shape is not None and addend.shape is not None
    fits = addend.shape == other.shape or (may_be_bias and [*other.shape] == [addend.shape[-1]])
    return read_once and not taken and known and fits


def _read_size(size: int | ir.SymbolicDim) -> int | str | None:
    return size if isinstance(size, int) else size.value


def _set_input(node: ir.Node, index: int, value: ir.Value | None) -> None:
    """Set the input at this index, which the node may lack so far."""
    if len(node.inputs) <= index:
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)


FUSIONS = {
    (DOMAIN, "Norm"): _fuse_norm,
    ("", "Add"): _fuse_sum,
    ("", "Mul"): _fuse_gate,
    ("", "Split"): _fuse_split,
    ("", "Where"): _fuse_zeros,
}
