"""mix_streams: what lies between a model's residual streams and the branches that read them.

Shapes: B slots, T tokens, N streams of E numbers. Source: arXiv:2512.24880.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpbuild.plugins.definition import Node, define

NODE = Node("MixStreams", renamed={"norm_eps": "epsilon"})


def empty_inputs(x: Tensor, base: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty tensors like the results of mix_streams."""
    count = base.shape[0] - x.shape[-1] // norm.shape[0]
    weights = x.new_empty(*x.shape[:-1], count, dtype=torch.float32)
    return x.new_empty(*x.shape[:-1], norm.shape[0]), weights


@define(empty_inputs, NODE)
def mix_streams(
    x: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """Sum the streams x [B, T, N E] for a branch, and weigh its result's way back to them.

    The weights of both are products of x, normed as a whole, and fn [N E, N + N + N N], times the
    three numbers of scale, plus base. Those of the result are N of its own and N N of the streams
    [from, to], whose rows and columns sum to 1 after `iterations`. Returns the branch's input
    [B, T, E], normed by norm [E], and the result's weights [B, T, N + N N].
    """
    N = x.shape[-1] // norm.shape[0]
    pre, weights = balance_streams(weigh(x, fn, norm_eps), base, scale, N, iterations, eps)
    return sum_normed(x, pre, norm, norm_eps), weights


@define(
    lambda numbers, streams: (
        numbers.new_empty(*numbers.shape[:-1], streams),
        numbers.new_empty(*numbers.shape[:-1], streams + streams * streams),
    )
)
def balance_streams(
    numbers: Tensor, base: Tensor, scale: Tensor, streams: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Turn the products [B, T, N + N + N N] of `mix_streams` into weights, with N = streams.

    Returns those of the streams [B, T, N], and those of the branch's result [B, T, N + N N].
    """
    pre, post, comb = split_scaled(numbers, base, scale, streams)
    comb = comb.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre.sigmoid() + eps, torch.cat([2 * post.sigmoid(), comb.flatten(-2)], dim=-1)


def split_scaled(numbers: Tensor, base: Tensor, scale: Tensor, N: int) -> tuple[Tensor, ...]:
    """Scale the products, and add the base: [B, T, N], [B, T, N] and [B, T, N, N]."""
    factors = torch.cat([scale[i].expand(n) for i, n in enumerate((N, N, N * N))])
    pre, post, comb = (numbers * factors + base).split([N, N, N * N], dim=-1)
    return pre, post, comb.unflatten(-1, (N, N))


@define(
    lambda x, base, norm: (*empty_inputs(x, base, norm), torch.empty_like(x)),
    NODE,
)
def mix_joined_streams(
    x: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    branch: Tensor,
    weights: Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do `join_branch`, then `mix_streams` of the joined streams, which are the third result."""
    x = join_branch(x, branch, weights)
    return *mix_streams(x, fn, base, scale, norm, iterations, eps, norm_eps), x


@define(lambda x, norm: x.new_empty(*x.shape[:-1], norm.shape[0]), NODE)
def sum_streams(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor, eps: float, norm_eps: float
) -> Tensor:
    """Sum the streams as `mix_streams` does, for a head: fn [N E, N], base [N], scale [1]."""
    pre = (weigh(x, fn, norm_eps) * scale + base).sigmoid() + eps
    return sum_normed(x, pre, norm, norm_eps)


@define(lambda x: torch.empty_like(x), Node("JoinBranch"))
def join_branch(x: Tensor, branch: Tensor, weights: Tensor) -> Tensor:
    """Mix the streams x [B, T, N E], and add a branch's result [B, T, E] to each."""
    E = branch.shape[-1]
    N = x.shape[-1] // E
    post, comb = weights.split([N, N * N], dim=-1)
    mixed = comb.unflatten(-1, (N, N)).mT @ x.unflatten(-1, (N, E)).float()
    return (post[..., None] * branch[..., None, :] + mixed).flatten(-2).type_as(x)


def weigh(x: Tensor, fn: Tensor, eps: float) -> Tensor:
    """Multiply x, normed without a weight, by fn."""
    size = x.shape[-1:]
    x = x.float()
    return F.rms_norm(x, size, x.new_ones(size), eps) @ fn.float()


def sum_normed(x: Tensor, weights: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Return the weighed sum [B, T, E] of the streams, normed."""
    total = (weights[..., None] * x.unflatten(-1, (-1, norm.shape[0]))).sum(-2)
    return F.rms_norm(total, norm.shape, norm.float(), eps).type_as(x)
