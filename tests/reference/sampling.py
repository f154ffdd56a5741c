"""Sampling without speculation, token by token in numpy: the oracle of sampled text (O2)."""

import numpy as np
import torch
from numpy.typing import NDArray

from mtpbuild.builder.models.common.plain import PlainLM
from mtpbuild.runtime.contract.controls import StepControls
from tests.reference.recompute import next_logits


def distribution(logits: NDArray[np.float64], controls: StepControls) -> NDArray[np.float64]:
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


def edited(
    logits: NDArray[np.float64], tokens: list[int], prompt: int, controls: StepControls
) -> NDArray[np.float64]:
    """Logits [V] of the token behind `tokens`, of which the first `prompt` are the prompt.

    As vLLM edits them: bias, repetition (prompt and output), frequency and presence (output).
    """
    logits = logits.copy()
    for token, bias in zip(controls.bias_ids, controls.bias_values, strict=True):
        logits[token] += bias
    for token in set(tokens):
        up = logits[token] > 0
        logits[token] *= 1 / controls.repetition_penalty if up else controls.repetition_penalty
    for token in tokens[prompt:]:
        logits[token] -= controls.frequency_penalty
    for token in set(tokens[prompt:]):
        logits[token] -= controls.presence_penalty
    return logits


@torch.no_grad()
def sample(model: PlainLM, tokens: list[int], count: int, controls: StepControls) -> list[int]:
    """The next `count` tokens: the argmax if greedy, else the inverse CDF of p at each position's
    number.
    """
    tokens, prompt = list(tokens), len(tokens)
    numbers = controls.uniforms(len(tokens) + count)[0]
    for _ in range(count):
        found = next_logits(model, tokens).double().numpy()
        logits = edited(found, tokens, prompt, controls)
        if controls.temperature == 0:
            tokens.append(int(logits.argmax()))
            continue
        p = distribution(logits, controls)
        tokens.append(int((np.cumsum(p) <= numbers[len(tokens)]).sum()))
    return tokens[-count:]
