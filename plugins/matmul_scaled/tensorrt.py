"""matmul_scaled in TensorRT: our kernel in steps, a product with a constant weight in prompts."""

from importlib import import_module
from typing import Any

from mtpbuild.plugins import facet, matmul_scaled


def matmul_scaled_tensorrt(ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Convert the op for Torch-TensorRT; `ctx.constants` holds the network's `Constants`.

    With `ctx.few_tokens` it becomes a plugin, whose weight stays as it is stored. Of a constant
    TensorRT may decide otherwise.
    """
    if ctx.few_tokens:
        return facet(matmul_scaled, "plugins")(ctx, target, args, kwargs, name)
    x, values, scales = args[:3]
    scales_2 = args[3] if len(args) == 4 else None
    weight = ctx.constants.weight(x.dtype, values, scales, scales_2, name)
    matmul = import_module("torch_tensorrt.dynamo.conversion.impl").matmul
    return matmul.matrix_multiply(ctx, target, None, name, x, weight)
