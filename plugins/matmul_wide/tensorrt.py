"""matmul_wide in TensorRT: its Triton kernel as an AOT plugin, then the sum over its splits."""

from typing import Any

from mtpbuild.plugins.aot import as_plugins
from mtpbuild.plugins.matmul_wide.triton import matmul_wide_launches

_of_each_split = as_plugins(matmul_wide_launches)


def matmul_wide_tensorrt(ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Convert the op for Torch-TensorRT; the number of rows must be fixed."""
    import tensorrt as trt

    x, weight = args
    parts = _of_each_split(ctx, target, args, kwargs, name)  # [splits, rows, N]
    total = ctx.net.add_reduce(parts, trt.ReduceOperation.SUM, 1 << 0, False)
    total.name = f"{name}/sum"
    layer = ctx.net.add_shuffle(total.get_output(0))
    layer.reshape_dims = (*tuple(x.shape)[:-1], weight.shape[-1])
    layer.name = f"{name}/rows"
    return layer.get_output(0)
