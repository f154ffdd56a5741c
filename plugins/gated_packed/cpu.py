"""gated_packed as an operator of the CPU's library."""

from typing import Any

from mtpbuild.plugins.cpu.onnx import operator
from mtpbuild.plugins.matmul_nbits.onnx import FLOATS, HALVES, WEIGHT

GatedProduct = operator(
    "GatedProduct",
    {"x": FLOATS, "values": WEIGHT, "scales": HALVES},
    {"N": 0},
    optional=("scales",),
)


def gated_packed_cpu(x: Any, values: Any, scales: Any, outputs: int) -> Any:
    return GatedProduct(x, values, scales, N=outputs)
