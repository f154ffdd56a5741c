"""sum_of_ranks: all ranks' tensors, added in the order of ranks."""

import torch
from torch import Tensor

from mtpbuild.plugins.definition import define
from mtpbuild.runtime.contract.sums import GROUP


@define(lambda x: x.new_empty(x.shape))
def sum_of_ranks(x: Tensor, peers: Tensor) -> Tensor:
    """Sum all ranks' x [..] in fp32, rank 0's first: every rank gets the same bits every time.

    peers [ranks + 1] int64: the address of each rank's shared memory on this GPU, then this rank's
    number (`runtime/contract/sums.py`). Only the kernel reads it; the kernel takes up to `MOST`
    bytes. All ranks must make the same calls in the same order.
    """
    ranks, ops = peers.shape[0] - 1, torch.ops._c10d_functional
    every = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), ranks, GROUP))
    total = torch.zeros_like(x, dtype=torch.float32)
    for part in every.view(ranks, *x.shape).unbind():
        total = total + part.float()
    return total.to(x.dtype)
