"""kv_write: the only way that a step changes a cache."""

import torch
from torch import Tensor


@torch.library.custom_op("mtpbuild::kv_write", mutates_args=())
def kv_write(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    """Put rows [B, 1, T, C] into a cache [B, 1, S, C], from row start [B] of each slot on.

    The op is functional; a target binds its result to the cache's own memory. start + T <= S is
    the caller's duty (an overrun is an error in ONNX Runtime and silent in TensorRT).
    """
    index = start[:, None] + torch.arange(rows.shape[2], device=rows.device)
    index = index[:, None, :, None].expand(rows.shape)
    return cache.scatter(2, index, rows)


kv_write.register_fake(lambda cache, rows, start: torch.empty_like(cache))
