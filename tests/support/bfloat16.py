"""Checks how near a text in bfloat16 is to what the reference says in float32."""

from collections.abc import Sequence

import numpy as np
import torch

from mtpbuild.builder.models.deepseek_v3.reference import Transformer
from mtpbuild.builder.verify.play import Played

NEAR = 0.25  # a smaller gap between two logits may be ranked either way
OFF = 0.3  # of a log-probability; most are within a hundredth


@torch.no_grad()
def rounded(model: Transformer) -> Transformer:
    """Round a model's weights, in place, to numbers that bfloat16 holds exactly."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    return model


def check(model: Transformer, asked: Sequence[list[int]], played: Sequence[Played]) -> None:
    """Assert that each greedy token is the argmax or nearly, and its log-probability right."""
    gaps = [gap for pair in zip(asked, played, strict=True) for gap in judged(model, *pair)[0]]
    assert max(gaps) < NEAR
    assert sum(gap > 0 for gap in gaps) <= len(gaps) / 20, "and the argmax it is mostly"
    check_logprobs(model, asked, played)


def check_logprobs(
    model: Transformer, asked: Sequence[list[int]], played: Sequence[Played]
) -> None:
    off = [each for pair in zip(asked, played, strict=True) for each in judged(model, *pair)[1]]
    assert max(off) < OFF
    assert 0 < np.median(off) < 0.01


@torch.no_grad()
def judged(model: Transformer, prompt: list[int], text: Played) -> tuple[list[float], list[float]]:
    """Return per token how far it is below the largest logit, and how far its logprob is off."""
    known = torch.tensor([prompt + text.token_ids[:-1]])
    logits = model.lm_head(model.main(known))[0, len(prompt) - 1 :]
    said = torch.tensor(text.token_ids)[:, None]
    gaps = logits.amax(-1) - logits.gather(-1, said)[:, 0]
    meant = logits.log_softmax(-1).gather(-1, said)[:, 0]
    return gaps.tolist(), (meant - torch.tensor(text.logprobs)).abs().tolist()
