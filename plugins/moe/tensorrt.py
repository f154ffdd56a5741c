"""moe in TensorRT: its Triton kernels as AOT plugins, then the sum over a token's experts."""

from typing import Any

from mtpbuild.plugins.aot import as_plugins
from mtpbuild.plugins.moe.triton import moe_launches

_of_each_expert = as_plugins(moe_launches)


def moe_tensorrt(ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Convert the op for Torch-TensorRT: its launches as plugins, then the sum over k."""
    import tensorrt as trt

    outputs = _of_each_expert(ctx, target, args, kwargs, name)  # [N, k, E]
    layer = ctx.net.add_reduce(outputs, trt.ReduceOperation.SUM, 1 << 1, False)
    layer.name = f"{name}/sum"
    return layer.get_output(0)
