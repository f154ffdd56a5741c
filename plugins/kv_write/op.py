"""kv_write: write rows into a cache; steps change caches by this op alone."""

import torch
from torch import Tensor

from mtpbuild.plugins.definition import define


@define(lambda cache: torch.empty_like(cache))
def kv_write(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    """Write rows [B, 1, T, C] into a cache [B, 1, S, C], slot b's from row start[b] on.

    The op is functional; a target binds its result to the cache's own memory. The caller ensures
    start + T <= S: an overrun is an error in ONNX Runtime, but not detected in TensorRT.
    """
    slots = torch.arange(rows.shape[0], device=rows.device)[:, None]
    at = start[:, None] + torch.arange(rows.shape[2], device=rows.device)
    return cache.index_put((slots, torch.zeros_like(at), at), rows[:, 0])
