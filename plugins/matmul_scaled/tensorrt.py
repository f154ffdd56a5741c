"""matmul_scaled in TensorRT: a product with a constant weight, dequantised in the network."""

from importlib import import_module
from typing import Any


def matmul_scaled_tensorrt(ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Convert the op for Torch-TensorRT; `ctx.constants` holds the network's `Constants`."""
    x, values, scales = args[:3]
    scales_2 = args[3] if len(args) == 4 else None
    weight = ctx.constants.weight(x.dtype, values, scales, scales_2, name)
    matmul = import_module("torch_tensorrt.dynamo.conversion.impl").matmul
    return matmul.matrix_multiply(ctx, target, None, name, x, weight)
