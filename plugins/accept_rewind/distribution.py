"""From logits to the distribution that a request samples from, and a token from a uniform number.

Plain PyTorch that every target can trace. Shapes: rows are [..], the vocabulary is V.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtpbuild.plugins.accept_rewind.branch import when


@dataclass(frozen=True)
class Shaping:
    """Per-slot parameters, each [B] or broadcastable to the rows; 0 (top_p: 1) switches one off."""

    temperature: Tensor  # 0: greedy
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def rows(self, dims: int) -> "Shaping":
        """The same with `dims` more dimensions behind the slots."""
        index = (slice(None),) + (None,) * dims
        return Shaping(
            self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index]
        )


def shaped_probs(logits: Tensor, s: Shaping) -> Tensor:
    """p [.., V] after temperature, top-k, top-p and min-p, in this order; s is [.., 1].

    top-p is taken over what top-k left, min-p relative to the largest probability. Each filter is a
    threshold, so tokens that tie with the last one kept are kept too. A greedy row (temperature 0)
    comes out as the plain softmax.
    """
    sampled = s.temperature > 0
    p = (logits / torch.where(sampled, s.temperature, 1.0)).softmax(-1)
    filters = sampled & ((s.top_k > 0) | (s.top_p < 1) | (s.min_p > 0))
    k = torch.where(sampled, s.top_k, 0)
    mass = torch.where(sampled, s.top_p, 1.0)
    least = torch.where(sampled, s.min_p, 0.0)
    return when(filters.any(), _filtered, _unfiltered, (p, k, mass, least))[0]


def _filtered(p: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, ...]:
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
    return _unfiltered(torch.where(p >= floor, p, 0.0))


def _unfiltered(p: Tensor, *filters: Tensor) -> tuple[Tensor, ...]:
    """Normalised here too: a request's numbers don't depend on whether another one's filters."""
    return (p / p.sum(-1, keepdim=True),)


def draw(p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The token at `uniform` [..] in [0, 1) of the inverse CDF of p [.., V], in token-id order.

    Also returns the distance of the uniform to the border of the token's cell: how far another
    target's rounding is from another token. p need not be normalised, but must not be all zero.
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
