"""matmul_nbits in ONNX: ONNX Runtime's own MatMulNBits."""

from typing import Any

from onnx.defs import OpSchema
from onnxscript.values import Op, Opset

from mtpbuild.plugins.matmul_nbits.op import BLOCK, bits_of

DOMAIN, NAME = "com.microsoft", "MatMulNBits"
INTEGERS = ("K", "N", "bits", "block_size", "accuracy_level")
INT8 = 4  # accuracy level: x is rounded to int8 per row and block; the others are slow in 8 bits

# The part of ONNX Runtime's schema that is used here; the onnx package does not know its operators.
SCHEMA = OpSchema(
    NAME,
    DOMAIN,
    1,
    inputs=[OpSchema.FormalParameter(*typed) for typed in (("A", "T"), ("B", "U"), ("s", "T"))],
    outputs=[OpSchema.FormalParameter("Y", "T")],
    type_constraints=[("T", ["tensor(float)"], ""), ("U", ["tensor(uint8)"], "")],
    attributes=[OpSchema.Attribute(name, OpSchema.AttrType.INT) for name in INTEGERS],
)
MatMulNBits = Op(Opset(DOMAIN, 1), NAME, SCHEMA)


def matmul_nbits_onnx(x: Any, values: Any, scales: Any) -> Any:
    """Write one node. A row's result does not depend on others: integer sums are exact."""
    N, blocks, width = (int(size) for size in values.shape)
    sizes = (blocks * BLOCK, N, bits_of(width), BLOCK, INT8)
    return MatMulNBits(x, values, scales, **dict(zip(INTEGERS, sizes, strict=True)))
