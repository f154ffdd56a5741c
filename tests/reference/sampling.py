"""Sampling without speculation, token by token in numpy: the oracle of sampled text (O2)."""

import numpy as np
import torch
from numpy.typing import NDArray

from mtpbuild.builder.models.common.plain import Reference
from mtpbuild.runtime.controls import Controls
from tests.reference.recompute import next_logits


def distribution(logits: NDArray[np.float64], controls: Controls) -> NDArray[np.float64]:
    """p after temperature, top-k, top-p and min-p, one filter after the other."""
    scaled = logits / controls.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    if controls.top_k:
        p[p < np.sort(p)[-min(controls.top_k, len(p))]] = 0
    p /= p.sum()
    if controls.top_p < 1:
        order, mass = np.argsort(-p), 0.0
        for token in order:
            if mass >= controls.top_p:
                p[token] = 0
            mass += p[token]
    p[p < controls.min_p * p.max()] = 0
    return p / p.sum()


@torch.no_grad()
def sample(model: Reference, tokens: list[int], count: int, controls: Controls) -> list[int]:
    """The next `count` tokens: at each position the inverse CDF of p at that position's number."""
    tokens = list(tokens)
    numbers = controls.uniforms(len(tokens) + count)[0]
    for _ in range(count):
        p = distribution(next_logits(model, tokens).double().numpy(), controls)
        tokens.append(int((np.cumsum(p) <= numbers[len(tokens)]).sum()))
    return tokens[-count:]
