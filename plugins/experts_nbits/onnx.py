"""experts_nbits in ONNX: ONNX Runtime's own QMoE, which here has one expert to choose per row.

So a row's result depends on nothing else, to the bit: over several experts QMoE sums in an order
that depends on the rows beside it and on the threads.
"""

from typing import Any

from onnx.defs import OpSchema
from onnxscript.onnx_opset import opset24 as op
from onnxscript.values import Op, Opset

from mtpbuild.plugins.experts_nbits.op import bits_of
from mtpbuild.plugins.matmul_nbits.onnx import DOMAIN, INT8
from mtpbuild.plugins.matmul_nbits.op import BLOCK

NAME = "QMoE"
INTEGERS = {
    "k": 1,
    "swiglu_fusion": 1,  # gates and ups in turn: the CPU's kernel takes nothing else
    "normalize_routing_weights": 0,
    "block_size": BLOCK,
    "accuracy_level": INT8,
}
FLOATS = {"activation_alpha": 1.0, "activation_beta": 0.0}  # silu(gate) * up

# The part of ONNX Runtime's schema that is used here; the onnx package does not know its operators.
OPTIONAL = OpSchema.FormalParameterOption.Optional
SCHEMA = OpSchema(
    NAME,
    DOMAIN,
    1,
    inputs=[
        OpSchema.FormalParameter(*typed)
        for typed in (("input", "T"), ("router_probs", "T"), ("fc1", "U"), ("fc1_scales", "T"))
    ]
    + [OpSchema.FormalParameter("fc1_bias", "T", param_option=OPTIONAL)]
    + [OpSchema.FormalParameter(*typed) for typed in (("fc2", "U"), ("fc2_scales", "T"))],
    outputs=[OpSchema.FormalParameter("output", "T")],
    type_constraints=[("T", ["tensor(float)"], ""), ("U", ["tensor(uint8)"], "")],
    attributes=[
        *(OpSchema.Attribute(name, OpSchema.AttrType.INT) for name in INTEGERS),
        OpSchema.Attribute("expert_weight_bits", OpSchema.AttrType.INT),
        *(OpSchema.Attribute(name, OpSchema.AttrType.FLOAT) for name in FLOATS),
        OpSchema.Attribute("activation_type", OpSchema.AttrType.STRING),
    ],
)
QMoE = Op(Opset(DOMAIN, 1), NAME, SCHEMA)


def experts_nbits_onnx(
    x: Any,
    ids: Any,
    gate_up_values: Any,
    gate_up_scales: Any,
    down_values: Any,
    down_scales: Any,
) -> Any:
    experts = op.Constant(value_int=int(gate_up_values.shape[0]))
    chosen = op.OneHot(ids, experts, op.Constant(value_floats=[0.0, 1.0]))
    return QMoE(
        x,
        chosen,  # the softmax over one expert is 1
        gate_up_values,
        gate_up_scales,
        None,
        down_values,
        down_scales,
        expert_weight_bits=bits_of(gate_up_values, gate_up_scales),
        activation_type="swiglu",
        **INTEGERS,
        **FLOATS,
    )
