"""product_packed as an operator of the CPU's library."""

from typing import Any

from mtpbuild.plugins.cpu.onnx import Product


def product_packed_cpu(x: Any, values: Any, scales: Any, outputs: int) -> Any:
    return Product(x, values, scales, N=outputs)
