"""What `verify` says about rounding: distances of distributions, and acceptance."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mtpbuild.lab.verify.quality import acceptance_length, measure_distance, replace_modules
from mtpbuild.runtime.requests.request import Result, TokenLogprobs
from tests.reference.recompute import draft_logits, greedy, row_logits
from tests.support.checkpoints import make_model, make_predictable

PROMPTS = [[5, 17, 3], [40, 2, 9, 11]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("drafter", ["mtp-eagle", "mtp-vanilla"])
def test_acceptance_is_that_of_steps(drafter: str) -> None:
    model, nextn = make_predictable(strength=0.8), 3
    texts = [greedy(model, prompt, 14) for prompt in PROMPTS]
    steps = emitted = 0
    for prompt, text in zip(PROMPTS, texts, strict=True):
        left = text[1:]
        while len(left) > nextn:
            known = prompt + text[: len(text) - len(left)]
            drafts = [int(x.argmax()) for x in draft_logits(model, known, nextn, drafter)]
            accepted = 0
            while accepted < nextn and drafts[accepted] == left[accepted]:
                accepted += 1
            left, steps, emitted = left[accepted + 1 :], steps + 1, emitted + accepted + 1
    found = acceptance_length(model, PROMPTS, texts, nextn, drafter == "mtp-eagle")
    assert found == emitted / steps
    assert 1 < found < nextn + 1


def test_distance_to_oneself_and_to_another() -> None:
    """A model's own first 20 tokens and the rest are at no distance; the whole law is known."""
    model, other = make_model(), make_model(1)
    texts = [greedy(model, prompt, 6) for prompt in PROMPTS]

    def played(by: Any, count: int) -> list[Result]:
        found = []
        for prompt, text in zip(PROMPTS, texts, strict=True):
            laws = row_logits(by, prompt + text[:-1])[len(prompt) - 1 :].log_softmax(-1)
            best = [law.topk(count) for law in laws]
            logprobs = tuple(
                TokenLogprobs(
                    0, 0.0, tuple(zip(b.indices.tolist(), b.values.tolist(), strict=True))
                )
                for b in best
            )
            found.append(cast(Result, SimpleNamespace(token_ids=text, logprobs=logprobs)))
        return found

    own = measure_distance(model, PROMPTS, played(model, 20))
    assert abs(own.kl) < 1e-6
    assert (own.same, own.positions) == (1, 12)
    wanted = []
    for prompt, text in zip(PROMPTS, texts, strict=True):
        p, q = (row_logits(m, prompt + text[:-1]).log_softmax(-1) for m in (model, other))
        wanted += (p.exp() * (p - q)).sum(-1)[len(prompt) - 1 :].tolist()
    whole = measure_distance(model, PROMPTS, played(other, 61))
    assert whole.kl == pytest.approx(sum(wanted) / 12, rel=1e-4)
    few = measure_distance(model, PROMPTS, played(other, 20))
    assert 0 < few.kl <= whole.kl
    assert few.same < 1


def test_modules_of_another_model() -> None:
    one: Any = make_model()
    other: Any = make_model(1)
    main = one.model.layers[0].input_layernorm.weight.clone()
    replace_modules(one, other)
    assert torch.equal(one.module(2).eh_proj.weight, other.module(2).eh_proj.weight)
    assert torch.equal(one.model.layers[0].input_layernorm.weight, main)
