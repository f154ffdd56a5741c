"""Declarations of ONNX operators that the onnx package does not know."""

from onnx.defs import OpSchema
from onnxscript.values import Op, Opset

ONNXRUNTIME = "com.microsoft"  # the domain of ONNX Runtime's own operators
KINDS = OpSchema.AttrType
ATTRIBUTES = {int: KINDS.INT, float: KINDS.FLOAT, str: KINDS.STRING}
TENSORS = [
    f"tensor({kind})"
    for kind in ("float", "float16", "bfloat16", "uint8", "int32", "int64", "bool")
]


def declare_operator(
    domain: str, name: str, inputs: str, outputs: int = 1, **attributes: float | str
) -> Op:
    """Declare an operator that checks the types of its operands itself.

    inputs: names, separated by spaces; each is optional. An attribute's value gives its type.
    """
    parameter, optional = OpSchema.FormalParameter, OpSchema.FormalParameterOption.Optional
    operands, results = inputs.split(), [f"output{i}" for i in range(outputs)]
    schema = OpSchema(
        name,
        domain,
        1,
        inputs=[
            parameter(operand, f"{operand}_type", param_option=optional) for operand in operands
        ],
        outputs=[parameter(operand, f"{operand}_type") for operand in results],
        type_constraints=[(f"{operand}_type", TENSORS, "") for operand in (*operands, *results)],
        attributes=[
            OpSchema.Attribute(key, ATTRIBUTES[type(value)]) for key, value in attributes.items()
        ],
    )
    return Op(Opset(domain, 1), name, schema)
