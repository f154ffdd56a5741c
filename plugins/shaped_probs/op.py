"""shaped_probs: turn logits into the distribution that a request samples from; draw a token.

The reference is plain PyTorch that every target can trace. V is the size of the vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mtpbuild.plugins.branch import when
from mtpbuild.plugins.control_tensors import Controls, name_controls
from mtpbuild.plugins.definition import define

SHAPING = ("temperature", "top_k", "top_p", "min_p")  # the controls that shape a distribution


def shaped_probs(logits: Tensor, controls: Controls) -> Tensor:
    """Turn logits into p [B, T, V] by temperature, top-k, top-p and min-p, in this order.

    top-p applies to the tokens that top-k has kept; min-p is relative to the largest probability.
    Each filter is a threshold, so tokens that tie with the last kept token are kept, too. A greedy
    row (temperature 0) gets the plain softmax.
    """
    temperature, top_k, top_p, min_p = (controls[name][:, None, None] for name in SHAPING)
    sampled = temperature > 0
    p = (logits / torch.where(sampled, temperature, 1.0)).softmax(-1)
    filters = sampled & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    k = torch.where(sampled, top_k, 0)
    mass = torch.where(sampled, top_p, 1.0)
    least = torch.where(sampled, min_p, 0.0)
    return when(filters.any(), _filter, _normalise, (p, k, mass, least))[0]


@define(lambda logits: torch.empty_like(logits))
def shaped_probs_op(logits: Tensor, controls: Sequence[Tensor]) -> Tensor:
    """Do `shaped_probs` as an op, for targets with its kernel; others trace the reference."""
    return shaped_probs(logits, name_controls(controls))


def _filter(p: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, ...]:
    V = p.shape[-1]
    ordered = p.sort(dim=-1, descending=True).values
    k = torch.where(top_k > 0, top_k.clamp(max=V), V)
    kth = ordered.gather(-1, (k - 1).expand(*p.shape[:-1], 1))
    left = torch.where(ordered >= kth, ordered, 0.0)
    before = left.cumsum(-1) - left
    limit = torch.where(top_p < 1, top_p, 2.0) * left.sum(-1, keepdim=True)
    kept = ((before < limit) & (left > 0)).sum(-1, keepdim=True).clamp(min=1)
    floor = torch.maximum(kth, ordered.gather(-1, kept - 1))
    floor = torch.maximum(floor, min_p * ordered[..., :1])
    return _normalise(torch.where(p >= floor, p, 0.0))


def _normalise(p: Tensor, *filters: Tensor) -> tuple[Tensor, ...]:
    """Normalise p, as `_filter` does: p must not depend on whether other requests have filters."""
    return (p / p.sum(-1, keepdim=True),)


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
