"""Acceptance statistics against vLLM's formulas."""

import logging
from typing import Any

import pytest

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.requests.stats import (
    AcceptanceCounter,
    AcceptanceWatch,
    RequestMetrics,
    SpeculativeDecoding,
)
from mtpbuild.runtime.requests.totals import RequestTotals
from tests.support.fakes import FakePrograms, fake_engine, fake_manifest

SYNTHETIC = {
    "acceptance": "rejection",
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.0, 0.0],
}


def test_formulas() -> None:
    counts = AcceptanceCounter(nextn=3)
    for accepted, drafted in [(0, 0), (3, 3), (1, 3), (0, 3), (3, 3), (2, 2)]:
        counts.add(accepted, drafted)
    rates = [4 / 6, 3 / 6, 2 / 6]
    wanted = SpeculativeDecoding(1 + 9 / 6, 9 / 14, rates, [2, 1, 1, 2], 6, 9, 14, 3)
    assert (counts.report(), counts.tokens) == (wanted, 6 + 9)


def test_without_drafting_every_step_gives_one_token() -> None:
    manifest = fake_manifest(nextn=0)
    result = Engine(FakePrograms(manifest), manifest).generate([5], SamplingParams(max_tokens=7))
    wanted = SpeculativeDecoding(1, None, [], [7], 7, 0, 0, 0)
    assert result.metrics.speculative_decoding == wanted


def test_before_the_first_step_nothing_is_claimed() -> None:
    wanted = SpeculativeDecoding(None, None, [0.0], [0, 0], 0, 0, 0, 1)
    assert AcceptanceCounter(nextn=1).report() == wanted


def test_a_request_that_ends_within_a_step() -> None:
    """Drafts are counted by whole steps, tokens as far as the request got them."""
    engine, _ = fake_engine(nextn=3)
    params = SamplingParams(max_tokens=3, logprobs=0)
    result = engine.generate([5], params)  # 1 token, then 4, of which 2 stay
    assert len(result.token_ids) == result.metrics.output_tokens == 3
    assert [entry.token_id for entry in result.logprobs or ()] == result.token_ids
    wanted = SpeculativeDecoding(3 / 2, 1.0, [0.5] * 3, [1, 0, 0, 1], 2, 3, 3, 3)
    assert result.metrics.speculative_decoding == engine.stats.speculative_decoding == wanted
    assert engine.stats.output_tokens == 3


def test_times() -> None:
    engine, _ = fake_engine(nextn=0, step_s=0.01)
    one = engine.generate([5, 6], SamplingParams(max_tokens=1)).metrics
    assert one.prompt_tokens == 2
    assert one.tpot_s is None
    assert one.ttft_s is not None
    assert one.ttft_s >= 0.01
    many = engine.generate([5, 6], SamplingParams(max_tokens=5)).metrics
    assert many.tpot_s is not None
    assert many.tpot_s >= 0.01
    assert 0 < many.tokens_per_s <= 100


def test_sums_of_sizes_and_times() -> None:
    """A request that waited 0.25 s for its slot and 0.5 s more for the first of three tokens."""
    totals, drafts = RequestTotals(100), AcceptanceCounter(1).report()
    metrics = RequestMetrics(5, 3, 0.75, 0.125, 9.0, drafts, queue_s=0.25)
    totals.add_request(metrics, 7, 1.25)
    assert {name: h.sum for name, h in totals.histograms.items() if h.sum} == {
        "request_params_max_tokens": 7,
        "request_prompt_tokens": 5,
        "request_generation_tokens": 3,
        "e2e_request_latency_seconds": 1.25,
        "request_queue_time_seconds": 0.25,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 0.25,
        "request_inference_time_seconds": 0.75,
        "request_time_per_output_token_seconds": 0.125,
    }


@pytest.mark.parametrize(
    ("nextn", "right", "settings", "warnings"),
    [
        (2, False, {}, 1),
        (2, True, {}, 0),
        (0, True, {}, 0),
        (2, False, {"temperature": 0.9}, 1),
        (2, False, {"temperature": 1.1}, 0),
        (2, False, SYNTHETIC, 0),
    ],
)
def test_rejected_drafts_are_said_once(
    nextn: int,
    right: bool,
    settings: dict[str, Any],
    warnings: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, _ = fake_engine(nextn=nextn, max_seq_len=2000, draft_is_right=lambda position: right)
    with caplog.at_level(logging.WARNING):
        engine.generate([5], SamplingParams(max_tokens=1500, **settings))
    assert len([r for r in caplog.records if "seldom accepted" in r.message]) == warnings


def test_when_drafts_count_as_rejected(caplog: pytest.LogCaptureFixture) -> None:
    """After 200 drafts in 50 steps or more, of which a tenth had a right first draft."""

    def watch(drafted: int, steps: int, right: int, undrafted: int = 0) -> int:
        """Return the warnings after steps, the first `right` of which had a right first draft."""
        caplog.clear()
        watched = AcceptanceWatch()
        for step in range(steps):
            watched.add(int(step < right), drafted)
            for _ in range(undrafted):
                watched.add(0, 0)
        return len(caplog.records)

    assert watch(1, 199, 0) == 0
    assert watch(1, 200, 19) == 1
    assert watch(1, 200, 20) == 0
    assert watch(1, 27, 0, undrafted=20) == 0, "an adaptive engine that seldom tries"
    assert watch(2, 100, 9) == 1
    assert watch(15, 49, 0) == 0
    assert watch(15, 50, 4) == 1
    assert watch(1, 400, 20) == 1, "each 200 are judged anew"
    assert watch(1, 1000, 0) == 1, "one warning a load"


def test_the_drafts_of_a_first_line() -> None:
    drafting = fake_manifest(nextn=3).drafting
    assert drafting == "drafts: 3 a step, by mtp-eagle"
    plain = fake_manifest(nextn=0)
    assert plain.drafting == "no drafts: it was built for none"
    model = plain.model.model_copy(update={"num_nextn_predict_layers": 0})
    headless = plain.model_copy(update={"model": model})
    assert headless.drafting == "no drafts: it has no head"
