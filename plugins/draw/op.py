"""draw: draw a token from a distribution."""

import torch
from torch import Tensor

from mtpbuild.plugins.definition import Node, define


@define(
    lambda p, uniform: (torch.empty_like(uniform, dtype=torch.int64), torch.empty_like(uniform)),
    Node("Draw"),
)
def draw(p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token at `uniform` [..] in [0, 1) of the inverse CDF of p [.., V], and its margin.

    The CDF is over token ids; each token has a cell as wide as its probability. The margin is the
    distance of the uniform number to the border of its cell: another target may draw another token
    if its rounding differs by more. p need not be normalised, but must not be all zero.
    """
    cdf = p.cumsum(-1)
    total = cdf[..., -1:]
    x = uniform[..., None] * total
    ids = torch.arange(p.shape[-1], device=p.device)
    last = torch.where(p > 0, ids, 0).amax(-1)  # rounding can carry x up to the total
    token = torch.minimum((cdf <= x).sum(-1), last)
    above = cdf.gather(-1, token[..., None])
    below = above - p.gather(-1, token[..., None])
    margin = torch.minimum(x - below, above - x) / total
    return token, margin[..., 0]
