"""The mixed program of a built engine: sampled, rejected, relaxed requests, alone and together."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.runtime import Engine, RequestError, SamplingParams
from tests.reference.recompute import greedy, next_logits
from tests.reference.sampling import check_alone, plain_text
from tests.support.engines import EngineBuilder

pytestmark = pytest.mark.xdist_group("predictable")  # another worker would wait for the engines
COUNT = 60
BEGIN, END = 7, 4  # 4 is in no text of `test_relaxed_acceptance`
KINDS = [(0,), (3,), pytest.param((3, "mtp-eagle"), marks=pytest.mark.full)]
HOT = SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=0.8, top_p=0.95, seed=5)
SETTINGS = [
    HOT,
    replace(HOT, temperature=1.3, top_p=1.0, top_k=9, seed=6),
    replace(HOT, temperature=0.6, min_p=0.1, seed=7),
    replace(HOT, draft_sample_method="greedy", seed=8),
]
PLAIN = SamplingParams(max_tokens=COUNT, ignore_eos=True)
RELAXED = replace(
    PLAIN,
    relaxed_topk=61,
    relaxed_delta=1.0,
    begin_thinking_phase_token=BEGIN,
    end_thinking_phase_token=END,
)


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(9, 61, n).tolist() for n in (1, 6, 11, 3)[:count]]


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_text_is_what_plain_sampling_gives(
    kind: tuple[Any, ...], predictable: PlainDeepseek, predictable_engine: EngineBuilder
) -> None:
    """O2 above temperature 0: for every nextn and drafter, drawn or argmax drafts."""
    accepted = 0
    with Engine.load(predictable_engine(*kind), threads=1) as engine:
        for params in SETTINGS:
            for prompt, result in zip(prompts(2), engine.generate(prompts(2), params), strict=True):
                assert result.token_ids == plain_text(predictable, prompt, params)
                assert result.seed == params.seed
                accepted += result.metrics.speculative_decoding.num_accepted_draft_tokens
    assert bool(accepted) == (kind != (0,))


def test_modes_share_a_batch(vanilla: Engine, predictable: PlainDeepseek) -> None:
    """Each request of a mixed batch gives what it gives alone, whoever it shares a step with."""
    rejection = replace(HOT, acceptance="rejection")
    block = replace(rejection, rejection_sample_method="block")
    params = [PLAIN, HOT, rejection, RELAXED, PLAIN, HOT, block]
    asked = [*prompts(3), [BEGIN, 20, 21], *prompts(3)]
    together = check_alone(vanilla, asked, params)
    for i in (0, 1, 4):
        assert together[i].token_ids == plain_text(predictable, asked[i], params[i])


def test_relaxed_acceptance(vanilla: Engine, predictable: PlainDeepseek) -> None:
    thought, closed = [9, BEGIN, 20, 21], [BEGIN, 20, END, 21]
    relaxed = vanilla.generate(thought, RELAXED)
    strict = vanilla.generate(thought, replace(RELAXED, relaxed_topk=1))
    outside = vanilla.generate(closed, RELAXED)
    # Everything is near enough: all drafts are accepted but in the first step, which has none.
    drafting = relaxed.metrics.speculative_decoding
    assert END not in relaxed.token_ids, "it thinks to the end"
    assert drafting.draft_acceptance_rate == 1.0
    assert relaxed.token_ids != strict.token_ids
    assert strict.token_ids == greedy(predictable, thought, COUNT)
    until = next((i for i, t in enumerate(outside.token_ids) if t == BEGIN), COUNT)
    assert outside.token_ids[:until] == greedy(predictable, closed, COUNT)[:until]


def test_block_verification_keeps_what_is_the_targets_own(vanilla: Engine) -> None:
    """Few drafts of these modules are wrong, so a block keeps at least as many as one by one."""
    alone = [replace(HOT, acceptance="rejection", seed=seed, max_tokens=200) for seed in range(4)]
    block = [replace(params, rejection_sample_method="block") for params in alone]
    lengths = []
    for each in (alone, block):
        reports = [r.metrics.speculative_decoding for r in vanilla.generate([[20]] * 4, each)]
        accepted = sum(r.num_accepted_draft_tokens for r in reports)
        lengths.append(accepted / sum(r.num_spec_steps for r in reports))
    assert lengths[1] > 0.9 * lengths[0] > 0


def test_logprobs(vanilla: Engine, predictable: PlainDeepseek) -> None:
    """Greedy and sampled: of the plain softmax of the reference model, at every token."""
    prompt = prompts(2)[1]
    for params in (PLAIN, HOT):
        result = vanilla.generate(prompt, replace(params, logprobs=3))
        assert result.token_ids == vanilla.generate(prompt, params).token_ids
        assert result.logprobs is not None
        assert [entry.token_id for entry in result.logprobs] == result.token_ids
        for i in (0, 1, COUNT - 1):
            found, known = result.logprobs[i], prompt + result.token_ids[:i]
            wanted = next_logits(predictable, known).log_softmax(-1)
            best = wanted.topk(3)
            assert [id for id, _ in found.top] == best.indices.tolist()
            assert [p for _, p in found.top] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert found.logprob == pytest.approx(float(wanted[found.token_id]), abs=1e-4)
    none = vanilla.generate(prompt, replace(PLAIN, logprobs=0, max_tokens=5)).logprobs
    assert none is not None
    assert [entry.top for entry in none] == [()] * 5


@pytest.mark.parametrize("nextn", [0, 3])
def test_no_end_before_min_tokens(
    nextn: int, predictable: PlainDeepseek, predictable_engine: EngineBuilder
) -> None:
    """A forbidden token is not emitted; the rest is what plain decoding without it gives."""
    engine = predictable_engine(nextn)
    prompt = prompts(2)[1]
    unbound = greedy(predictable, prompt, 12)
    ends = sorted(set(unbound[:4]))
    params = replace(PLAIN, ignore_eos=True, stop_token_ids=ends, min_tokens=6, max_tokens=12)
    wanted: list[int] = []
    while len(wanted) < 12 and not (len(wanted) > 6 and wanted[-1] in ends):
        logits = next_logits(predictable, prompt + wanted).clone()
        if len(wanted) < 6:
            logits[ends] = -torch.inf
        wanted.append(int(logits.argmax()))
    with Engine.load(engine, threads=1) as loaded:
        result = loaded.generate(prompt, params)
        with pytest.raises(RequestError, match="at most 16 tokens may end texts"):
            loaded.generate(prompt, replace(params, stop_token_ids=list(range(17))))
    assert result.token_ids == wanted


def test_synthetic_acceptance(vanilla: Engine) -> None:
    params = replace(
        PLAIN,
        max_tokens=200,
        acceptance="rejection",
        rejection_sample_method="synthetic",
        synthetic_acceptance_length=2.5,
    )
    rates = replace(
        params, synthetic_acceptance_length=None, synthetic_acceptance_rates=(1, 0.5, 0), seed=1
    )
    for each in (params, rates):
        result = vanilla.generate([20, 21], each)
        assert result.synthetic_acceptance_rates == (1.0, 0.5, 0.0)
        first, second, third = result.metrics.speculative_decoding.per_position_acceptance_rates
        assert first > 0.98  # the first step has no drafts
        assert 0.3 < second < 0.7
        assert third == 0
    with pytest.raises(RequestError, match="has 2 rates, nextn is 3"):
        vanilla.generate([20], replace(rates, synthetic_acceptance_rates=(1, 0.5)))
    with pytest.raises(RequestError, match=r"length 4.5 is outside 1..4"):
        vanilla.generate([20], replace(params, synthetic_acceptance_length=4.5))


def test_a_seed_is_drawn_and_reported(vanilla: Engine) -> None:
    wild = replace(HOT, temperature=4.0, top_p=1.0)  # two seeds never say the same
    first = vanilla.generate([20, 21], replace(wild, seed=None))
    assert first.seed is not None
    again = vanilla.generate([20, 21], replace(wild, seed=first.seed))
    other = vanilla.generate([20, 21], replace(wild, seed=first.seed + 1))
    assert again.token_ids == first.token_ids
    assert other.token_ids != first.token_ids
