"""gated_packed as an operator of the CPU's library."""

from typing import Any

from mtpbuild.plugins.contrib import BYTES, FLOATS, HALVES
from mtpbuild.plugins.cpu.onnx import operator

GatedProduct = operator("GatedProduct", {"x": FLOATS, "values": BYTES, "scales": HALVES}, {"N": 0})

GatedFloatProduct = operator("GatedFloatProduct", {"x": FLOATS, "values": FLOATS}, {"N": 0})


def gated_packed_cpu(x: Any, values: Any, scales: Any, outputs: int) -> Any:
    if scales is None:
        return GatedFloatProduct(x, values, N=outputs)
    return GatedProduct(x, values, scales, N=outputs)
