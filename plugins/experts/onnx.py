"""experts in ONNX: ONNX Runtime's own MoE, which reads an expert's weights once for all its rows.

Routing stays outside: a row has one expert to choose, and its sum with others is not MoE's. Each
expert in use has one row more than were given, so none has one alone: for one row ONNX Runtime
sums in another order than for several. So a row's result depends on nothing else, to the bit.
"""

from typing import Any

from onnxscript.onnx_opset import opset24 as op

from mtpbuild.plugins.matmul_nbits.onnx import FLOATS, contrib

ATTRIBUTES = {
    "k": 1,
    "normalize_routing_weights": 1,  # the one that is chosen weighs 1
    "swiglu_fusion": 1,  # gates and ups in turn: the CPU's kernel takes nothing else
    "activation_alpha": 1.0,
    "activation_beta": 0.0,  # silu(gate) * up
    "activation_type": "swiglu",
}
MoE = contrib(
    "MoE",
    dict.fromkeys(("input", "router_probs", "fc1", "fc1_bias", "fc2"), FLOATS),
    ATTRIBUTES,
    optional="fc1_bias",
)


def experts_onnx(x: Any, ids: Any, gate_up: Any, down: Any) -> Any:
    """Write one node that reads weights, and what gives each expert in use a second row."""
    used, first, _, _ = op.Unique(ids)
    rows = op.Concat(x, op.Gather(x, first), axis=0)
    experts = op.Constant(value_int=int(gate_up.shape[0]))
    chosen = op.OneHot(op.Concat(ids, used, axis=0), experts, op.Constant(value_floats=[0.0, 1.0]))
    y = MoE(rows, chosen, gate_up, None, down, **ATTRIBUTES)
    return op.Slice(y, op.Constant(value_ints=[0]), op.Shape(ids), op.Constant(value_ints=[0]))
