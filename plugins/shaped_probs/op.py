"""shaped_probs: turn logits into the distribution that a request samples from."""

import torch
from torch import Tensor

from mtpbuild.plugins.branch import when
from mtpbuild.plugins.control_tensors import Controls
from mtpbuild.plugins.definition import Node, define

SHAPING = ("temperature", "top_k", "top_p", "min_p")  # the controls that shape a distribution


@define(lambda logits: torch.empty_like(logits), Node("ShapedProbs"))
def shaped_probs(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Turn logits into p [B, T, V] by temperature, top-k, top-p and min-p [B], in this order.

    top-p applies to the tokens that top-k has kept; min-p is relative to the largest probability.
    Each filter is a threshold, so tokens that tie with the last kept token are kept, too. A greedy
    row (temperature 0) gets the plain softmax.
    """
    temperature, top_k, top_p, min_p = (
        control[:, None, None] for control in (temperature, top_k, top_p, min_p)
    )
    sampled = temperature > 0
    p = (logits / torch.where(sampled, temperature, 1.0)).softmax(-1)
    filters = sampled & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    k = torch.where(sampled, top_k, 0)
    mass = torch.where(sampled, top_p, 1.0)
    least = torch.where(sampled, min_p, 0.0)
    return when(filters.any(), _filter, _normalise, (p, k, mass, least))[0]


def list_shaping(controls: Controls) -> list[Tensor]:
    """Return the operands of `shaped_probs` after the logits."""
    return [controls[name] for name in SHAPING]


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
