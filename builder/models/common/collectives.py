"""Collectives among ranks that share a model: torch's functional ones, in the graph.

AOTInductor compiles them to calls of torch.distributed. The graph is the same for all ranks; it
reads its rank from a constant that the loader sets. A program must never return the tensor that a
collective wrote: gloo's thread needs Python's lock to release a tensor that Python refers to, and
the program's caller holds that lock while it waits for the thread: a deadlock. On GPUs collectives
are NCCL's, and only the GPU waits.
"""

import torch
from torch import Tensor, nn

from mtpbuild.plugins import best_of_blocks
from mtpbuild.runtime.group.start import GROUP

RANK = "rank"  # the last part of a rank constant's name


def make_rank_constant() -> nn.Parameter:
    """Return a constant [1] int64 for the rank, which loaders find by the name `rank`.

    It is a parameter, as the compiler folds other constants. The compiler also folds arithmetic
    that involves nothing else (`rank * size` is 0), so use it only in comparisons or as an index.
    """
    return nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)


def all_reduce(x: Tensor) -> Tensor:
    """Sum all ranks' x; every rank gets the same bits."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x, "sum", GROUP))


def all_gather(x: Tensor, rank: Tensor, ranks: int) -> Tensor:
    """Join all ranks' x [.., N] along the last axis: [.., ranks * N].

    Each part is summed with zeros, which is exact. AOTInductor has no call for all_gather on a CPU;
    its substitute hands the tensor to Python, which leads to the deadlock above.
    """
    is_own = torch.arange(ranks, device=x.device)[:, None] == rank
    return all_reduce(torch.where(is_own, x[..., None, :], 0.0).flatten(-2))


def gather_best(logits: Tensor, rank: Tensor, ranks: int) -> Tensor:
    """Return the input of `accept_best` for all ranks' logits [.., N]: [.., ranks * blocks, 5].

    A rank sends 20 bytes for each 4,096 logits instead of the logits.
    """
    best = best_of_blocks(logits).unsqueeze(-3)
    numbers = torch.arange(ranks, device=logits.device)[:, None, None]
    ids = best[..., 4:] + numbers * logits.shape[-1]
    candidates = torch.cat([best[..., :4].expand(*ids.shape[:-1], 4), ids], -1)
    mine = torch.where(numbers == rank, candidates, 0.0)
    return all_reduce(mine.flatten(-3)).unflatten(-1, (-1, 5))


def gather_stacked(x: Tensor, rank: Tensor, ranks: int) -> Tensor:
    """Stack all ranks' x [..] as [ranks, ..], in order, by a sum with zeros as in `all_gather`."""
    is_own = torch.arange(ranks, device=x.device) == rank
    return all_reduce(torch.where(is_own.view(-1, *[1] * x.dim()), x, 0.0))


def scatter_sums(x: Tensor, rank: Tensor) -> Tensor:
    """Sum x [ranks, ..] over all ranks and return this rank's row [..]."""
    return all_reduce(x).index_select(0, rank)[0]


def take_own_part(x: Tensor, part: Tensor, parts: int) -> Tensor:
    """Return part number `part` [1] of x [.., parts * N]: [.., N]."""
    return x.unflatten(-1, (parts, -1)).index_select(-2, part).squeeze(-2)
