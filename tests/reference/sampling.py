"""Sampling without speculation, token by token in numpy: the oracle of sampled text (O2)."""

import numpy as np
import torch
from numpy.typing import NDArray

from mtpbuild.builder.models.common.plain import PlainLM
from mtpbuild.runtime import Engine, Result, SamplingParams
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
    """Return logits [V] of the token after `tokens`, of which the first `prompt` are the prompt.

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
    """Return the next `count` tokens.

    Each is the argmax if greedy, else the inverse CDF of p at the position's number.
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


def plain_text(model: PlainLM, prompt: list[int], params: SamplingParams) -> list[int]:
    """Return what a strict request says after a prompt, decoded without drafts and caches."""
    names = ["temperature", "top_k", "top_p", "min_p"]
    names += ["presence_penalty", "frequency_penalty", "repetition_penalty"]
    bias = params.logit_bias or {}
    controls = StepControls(
        **{name: getattr(params, name) for name in names},
        bias_ids=tuple(bias),
        bias_values=tuple(bias.values()),
        seed=params.seed or 0,
    )
    return sample(model, prompt, params.max_tokens, controls)


def check_texts(
    engine: Engine, model: PlainLM, prompts: list[list[int]], params: list[SamplingParams]
) -> list[Result]:
    """Check O2 and O7: requests say at once what plain decoding says of each; return results."""
    results = engine.generate(prompts, params)
    for prompt, own, result in zip(prompts, params, results, strict=True):
        assert list(result.token_ids) == plain_text(model, prompt, own)
    return results


def check_alone(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams]
) -> list[Result]:
    """Check O7: requests say together what each says alone; return the results."""
    together = engine.generate(prompts, params)
    alone = [engine.generate(*each) for each in zip(prompts, params, strict=True)]
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    return together
