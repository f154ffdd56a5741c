"""Ranks that share a model meet in torch's functional collectives, in the traced graph.

AOTInductor compiles them to calls of torch.distributed. The graph is the same for all ranks: which
one it runs on it reads from a constant that is given when it is loaded. What a collective wrote
must not leave a program as it is: gloo's thread lets go of a tensor that Python knows only with
Python's lock, which the program's caller holds while it waits for that thread.
On GPUs they are NCCL's, and only the GPU waits.
"""

import torch
from torch import Tensor, nn

from mtpbuild.runtime.group.start import GROUP

RANK = "rank"  # the last part of a rank constant's name


def rank_constant() -> nn.Parameter:
    """[1] int64; a parameter, as the compiler folds other constants. Loaders know it by `rank`."""
    return nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)


def all_reduce(x: Tensor) -> Tensor:
    """The sum of all ranks' x, the same bits on each."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x, "sum", GROUP))


def all_gather(x: Tensor, rank: Tensor, ranks: int) -> Tensor:
    """All ranks' x [.., N], one behind the other: [.., ranks * N].

    A sum with zeros, which is exact. AOTInductor has no call for all_gather on a CPU, and what it
    does instead lets Python see the tensor: the deadlock above.
    """
    own = torch.arange(ranks, device=x.device)[:, None] == rank
    return all_reduce(torch.where(own, x[..., None, :], 0.0).flatten(-2))


def every_rank(x: Tensor, rank: Tensor, ranks: int) -> Tensor:
    """All ranks' x [..], in their order: [ranks, ..]; a sum with zeros, as in `all_gather`."""
    own = torch.arange(ranks, device=x.device) == rank
    return all_reduce(torch.where(own.view(-1, *[1] * x.dim()), x, 0.0))


def own_sum(x: Tensor, rank: Tensor) -> Tensor:
    """x [ranks, ..], a part of each rank's terms -> this rank's, summed over all: [..]."""
    return all_reduce(x).index_select(0, rank)[0]


def own_part(x: Tensor, part: Tensor, parts: int) -> Tensor:
    """x [.., parts * N] -> the part [.., N] of number `part` [1]."""
    return x.unflatten(-1, (parts, -1)).index_select(-2, part).squeeze(-2)
