"""matmul_nbits in ONNX: ONNX Runtime's own MatMulNBits."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from onnx.defs import OpSchema
from onnxscript import ir
from onnxscript.onnx_opset import opset24 as op
from onnxscript.values import Op, Opset

from mtpbuild.plugins.matmul_nbits.op import BLOCK, bits_of

DOMAIN = "com.microsoft"
INT8 = 4  # accuracy level: round x to int8 per row and block; other levels are slow with 8 bits
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


SIZES = ("K", "N", "bits", "block_size", "accuracy_level")
MatMulNBits = contrib(
    "MatMulNBits", {"A": FLOATS, "B": BYTES, "scales": FLOATS}, dict.fromkeys(SIZES, 0)
)


def matmul_nbits_onnx(x: Any, values: Any, scales: Any) -> Any:
    """Emit one node; a row's result does not depend on other rows, as integer sums are exact."""
    N, blocks, width = (int(size) for size in values.shape)
    sizes = (blocks * BLOCK, N, bits_of(width), BLOCK, INT8)
    return MatMulNBits(x, values, in_fp32(scales), **dict(zip(SIZES, sizes, strict=True)))


def in_fp32(scales: Any) -> Any:
    """Return the scales in fp32; ONNX Runtime folds the cast of a constant when it loads."""
    return scales if scales.dtype == ir.DataType.FLOAT else op.Cast(scales, to=ir.DataType.FLOAT)
