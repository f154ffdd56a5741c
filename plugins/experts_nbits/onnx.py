"""experts_nbits in ONNX: ONNX Runtime's own QMoE, with one expert per row.

QMoE sums several experts in an order that depends on the other rows and on the threads. With one
expert, a row's result is the same to the bit, whatever the other rows are.
"""

from typing import Any

from onnxscript.onnx_opset import opset24 as op

from mtpbuild.plugins.experts_nbits.op import bits_of
from mtpbuild.plugins.matmul_nbits.onnx import BYTES, FLOATS, INT8, contrib, in_fp32
from mtpbuild.plugins.matmul_nbits.op import BLOCK

ATTRIBUTES = {
    "k": 1,
    "swiglu_fusion": 1,  # gates and ups alternate: the CPU's kernel takes no other order
    "normalize_routing_weights": 0,
    "block_size": BLOCK,
    "accuracy_level": INT8,
    "expert_weight_bits": 8,  # or 4
    "activation_alpha": 1.0,
    "activation_beta": 0.0,  # silu(gate) * up
    "activation_type": "swiglu",
}
QMoE = contrib(
    "QMoE",
    {
        **{"input": FLOATS, "router_probs": FLOATS, "fc1": BYTES, "fc1_scales": FLOATS},
        **{"fc1_bias": FLOATS, "fc2": BYTES, "fc2_scales": FLOATS},
    },
    ATTRIBUTES,
    optional="fc1_bias",
)


def experts_nbits_onnx(
    x: Any, ids: Any, values: Any, scales: Any, down: Any, down_scales: Any
) -> Any:
    """Emit one QMoE node; `values` and `scales` are those of gates and ups."""
    experts = op.Constant(value_int=int(values.shape[0]))
    chosen = op.OneHot(ids, experts, op.Constant(value_floats=[0.0, 1.0]))  # softmax over one is 1
    attributes = ATTRIBUTES | {"expert_weight_bits": bits_of(values, scales)}
    factors, down_factors = in_fp32(scales), in_fp32(down_scales)
    return QMoE(x, chosen, values, factors, None, down, down_factors, **attributes)
