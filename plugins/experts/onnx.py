"""experts in ONNX: ONNX Runtime's own MoE, which reads an expert's weights once for all its rows.

Routing and weighted sums are outside the node, in which each row has one expert. ONNX Runtime sums
a single row in another order than several rows, so every expert in use gets one extra row. Then a
row's result is the same to the bit, whatever the other rows are.
"""

from typing import Any

from onnxscript.onnx_opset import opset24 as op

from mtpbuild.plugins.onnx import ONNXRUNTIME, declare_operator

ATTRIBUTES: dict[str, Any] = {
    "k": 1,
    "normalize_routing_weights": 1,  # the chosen expert has weight 1
    "swiglu_fusion": 1,  # gates and ups alternate: the CPU's kernel takes no other order
    "activation_alpha": 1.0,
    "activation_beta": 0.0,  # silu(gate) * up
    "activation_type": "swiglu",
}
MoE = declare_operator(ONNXRUNTIME, "MoE", "input router_probs fc1 fc1_bias fc2", **ATTRIBUTES)


def experts_onnx(
    x: Any, ids: Any, gate_up: Any, down: Any, gelu: bool = False, limit: float = 0.0
) -> Any:
    """Emit one MoE node, with nodes that add and remove an extra row for each expert in use."""
    used, first, _, _ = op.Unique(ids)
    rows = op.Concat(x, op.Gather(x, first), axis=0)
    experts = op.Constant(value_int=int(gate_up.shape[0]))
    chosen = op.OneHot(op.Concat(ids, used, axis=0), experts, op.Constant(value_floats=[0.0, 1.0]))
    y = MoE(rows, chosen, gate_up, None, down, **ATTRIBUTES)
    return op.Slice(y, op.Constant(value_ints=[0]), op.Shape(ids), op.Constant(value_ints=[0]))
