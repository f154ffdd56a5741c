"""Penalties and biases in built engines, against decoding token by token in numpy (O2, O7)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.runtime import Engine, RequestError, SamplingParams
from mtpbuild.runtime.requests.step_controls import make_step_controls
from tests.reference.recompute import greedy, next_logits
from tests.reference.sampling import check_alone, plain_text
from tests.support.engines import EngineBuilder
from tests.support.fakes import fake_manifest

pytestmark = pytest.mark.xdist_group("predictable")  # another worker would wait for the engines
COUNT = 40
KINDS = [(0,), (3,), pytest.param((3, "mtp-eagle"), marks=pytest.mark.full)]
PLAIN = SamplingParams(max_tokens=COUNT, ignore_eos=True)
ALL = replace(
    PLAIN,
    presence_penalty=0.8,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    logit_bias={20: 1.5, 31: -100},
)
HOT = replace(ALL, temperature=0.7, top_p=0.95, seed=5)
SETTINGS = [
    replace(PLAIN, presence_penalty=2.0),
    replace(PLAIN, repetition_penalty=1.3),
    ALL,
    HOT,
    replace(HOT, frequency_penalty=-0.5, repetition_penalty=0.9, seed=6),
]
PROMPTS = [[20], np.random.default_rng(5).integers(9, 61, 11).tolist()]


@pytest.fixture(scope="module")
def texts(predictable: PlainDeepseek) -> list[list[list[int]]]:
    """Return what each of SETTINGS says after each of PROMPTS."""
    return [[plain_text(predictable, prompt, params) for prompt in PROMPTS] for params in SETTINGS]


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_what_plain_decoding_gives(
    kind: tuple[Any, ...], texts: list[list[list[int]]], predictable_engine: EngineBuilder
) -> None:
    """Greedy and sampled, for every nextn and drafter; drafts are accepted all the same."""
    accepted = 0
    with Engine.load(predictable_engine(*kind), threads=1) as loaded:
        for params, output in zip(SETTINGS, texts, strict=True):
            results = loaded.generate(PROMPTS, params)
            assert [result.token_ids for result in results] == output
            for result in results:
                accepted += result.metrics.speculative_decoding.num_accepted_draft_tokens
    assert bool(accepted) == (kind != (0,))


@pytest.mark.full
def test_an_adaptive_engine(
    texts: list[list[list[int]]], predictable_engine: EngineBuilder
) -> None:
    """Steps of any number of drafts write the same history."""
    engine = predictable_engine("auto", max_batch=3)
    with Engine.load(engine, threads=1) as loaded:
        for params, output in zip(SETTINGS[2:4], texts[2:4], strict=True):
            assert [r.token_ids for r in loaded.generate(PROMPTS, params)] == output


def test_requests_share_slots(
    vanilla: Engine, predictable: PlainDeepseek, texts: list[list[list[int]]]
) -> None:
    """Texts are the same if slots move, or if others had them, cancelled requests too."""
    rejection = replace(HOT, acceptance="rejection")
    block = replace(rejection, rejection_sample_method="block")
    params = [ALL, PLAIN, HOT, rejection, replace(ALL, max_tokens=9), block, HOT, PLAIN]
    asked = [PROMPTS[i % 2] for i in range(len(params))]
    together = check_alone(vanilla, asked, params)
    with vanilla.stream(PROMPTS[1], replace(ALL, max_tokens=80)) as stream:
        next(iter(stream))  # it ends in the middle
    again = vanilla.generate(PROMPTS[0], replace(PLAIN, presence_penalty=2.0))
    assert together[0].token_ids == texts[2][0]
    assert together[6].token_ids == texts[3][0]
    assert together[7].token_ids == greedy(predictable, asked[7], COUNT)
    assert again.token_ids == texts[0][0]


def test_log_probabilities_stay_raw(vanilla: Engine, predictable: PlainDeepseek) -> None:
    result = vanilla.generate(PROMPTS[1], replace(ALL, logprobs=2, max_tokens=12))
    assert result.logprobs is not None
    for i, entry in enumerate(result.logprobs):
        raw = next_logits(predictable, PROMPTS[1] + result.token_ids[:i]).log_softmax(-1)
        assert entry.logprob == pytest.approx(float(raw[entry.token_id]), abs=1e-4)
        assert [id for id, _ in entry.top] == raw.topk(2).indices.tolist()


ASKED: tuple[dict[str, object], ...] = ({"presence_penalty": 0.1}, {"frequency_penalty": -2})
ASKED += ({"repetition_penalty": 1.1}, {"logit_bias": {5: 1}})


@pytest.mark.parametrize("asked", ASKED)
def test_an_engine_without_them_refuses(asked: dict[str, object]) -> None:
    """One for a GPU: its state has no history."""
    (name,), manifest = asked, fake_manifest()
    with pytest.raises(RequestError, match=f"{name} is not supported by this engine") as caught:
        make_step_controls([1, 2], SamplingParams(**asked), manifest)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    nothing = SamplingParams(presence_penalty=0, repetition_penalty=1, logit_bias={})
    assert make_step_controls([1, 2], nothing, manifest).plain
