"""Declarations of operators that the onnx package does not know, for facets in ONNX."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from onnx.defs import OpSchema
from onnxscript.values import Op, Opset

DOMAIN = "com.microsoft"
FLOATS, BYTES, INTS = "tensor(float)", "tensor(uint8)", "tensor(int64)"
BOOLS = "tensor(bool)"
HALVES, BFLOATS = "tensor(float16)", "tensor(bfloat16)"
WEIGHT = "W"  # fp32 or bytes
ROWS = "R"  # cache rows: fp32 or bfloat16
KINDS = {int: OpSchema.AttrType.INT, float: OpSchema.AttrType.FLOAT, str: OpSchema.AttrType.STRING}


def contrib(
    name: str,
    inputs: Mapping[str, str],
    attributes: Mapping[str, Any],
    optional: Collection[str] = (),
    domain: str = DOMAIN,
    outputs: Sequence[str] = (FLOATS,),
) -> Op:
    """Declare an operator of ONNX Runtime, which the onnx package does not know.

    Only the inputs and attributes in use are declared. An attribute's type is that of its value.
    outputs: their types, in order.
    """
    options = OpSchema.FormalParameterOption
    schema = OpSchema(
        name,
        domain,
        1,
        inputs=[
            OpSchema.FormalParameter(
                i, kind, param_option=options.Optional if i in optional else options.Single
            )
            for i, kind in inputs.items()
        ],
        outputs=[OpSchema.FormalParameter(f"output{i}", kind) for i, kind in enumerate(outputs)],
        type_constraints=[
            (WEIGHT, [FLOATS, BYTES], "packed numbers"),
            (ROWS, [FLOATS, BFLOATS], "rows of a cache"),
        ],
        attributes=[OpSchema.Attribute(a, KINDS[type(value)]) for a, value in attributes.items()],
    )
    return Op(Opset(domain, 1), name, schema)
