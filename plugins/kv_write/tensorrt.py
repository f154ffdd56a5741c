"""kv_write in TensorRT: KVCacheUpdate, whose result is written over the cache."""

from typing import Any


def kv_write_tensorrt(ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Convert the op for Torch-TensorRT.

    The cache must be an input of the network and the result an output; the caller binds both to one
    address.
    """
    import tensorrt as trt

    cache, rows, start = args
    start = ctx.net.add_cast(start, trt.int32).get_output(0)  # the layer takes int32
    layer = ctx.net.add_kv_cache_update(cache, rows, start, trt.KVCacheMode.LINEAR)
    layer.name = name
    return layer.get_output(0)
