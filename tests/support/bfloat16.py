"""Checks how near a text in bfloat16 is to the reference's text in float32."""

from collections.abc import Sequence

import numpy as np
import torch

from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.lab.measure.runs import TimedAnswer

NEAR = 0.25  # a smaller gap between two logits may be ranked either way
OFF = 0.3  # allowed error of a log-probability; most are within 0.01
RARE = 20  # one token in so many may be off: rounding decides between experts of equal scores


@torch.no_grad()
def rounded(model: PlainDeepseek) -> PlainDeepseek:
    """Round a model's weights, in place, to numbers that bfloat16 holds exactly."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    return model


def check(model: PlainDeepseek, asked: Sequence[list[int]], played: Sequence[TimedAnswer]) -> None:
    """Assert that greedy tokens are the argmax or nearly, with the right log-probabilities."""
    gaps = [gap for pair in zip(asked, played, strict=True) for gap in judged(model, *pair)[0]]
    assert max(gaps) < NEAR
    assert sum(gap > 0 for gap in gaps) <= len(gaps) / RARE, "and the argmax it is mostly"
    check_logprobs(model, asked, played)


def check_logprobs(
    model: PlainDeepseek, asked: Sequence[list[int]], played: Sequence[TimedAnswer]
) -> None:
    off = [each for pair in zip(asked, played, strict=True) for each in judged(model, *pair)[1]]
    assert sum(each > OFF for each in off) <= len(off) / RARE
    assert 0 < np.median(off) < 0.01


@torch.no_grad()
def judged(
    model: PlainDeepseek, prompt: list[int], text: TimedAnswer
) -> tuple[list[float], list[float]]:
    """Return each token's distance below the largest logit, and its log-probability's error."""
    known = torch.tensor([prompt + text.token_ids[:-1]])
    logits = model.lm_head(model.main(known))[0, len(prompt) - 1 :]
    output = torch.tensor(text.token_ids)[:, None]
    gaps = logits.amax(-1) - logits.gather(-1, output)[:, 0]
    meant = logits.log_softmax(-1).gather(-1, output)[:, 0]
    return gaps.tolist(), (meant - torch.tensor(text.logprobs)).abs().tolist()
