"""product_packed as an operator of the CPU's library."""

from typing import Any

from mtpbuild.plugins.contrib import BYTES, FLOATS, HALVES
from mtpbuild.plugins.cpu.onnx import FloatProduct, operator

Product = operator("Product", {"x": FLOATS, "values": BYTES, "scales": HALVES}, {"N": 0})


def product_packed_cpu(x: Any, values: Any, scales: Any, outputs: int) -> Any:
    if scales is None:
        return FloatProduct(x, values, N=outputs)
    return Product(x, values, scales, N=outputs)
