"""Acceptance statistics against vLLM's formulas."""

import logging

import pytest

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.requests.stats import AcceptanceCounter, RequestMetrics
from mtpbuild.runtime.requests.totals import RequestTotals
from tests.support.fakes import FakePrograms, fake_engine, fake_manifest


def test_formulas() -> None:
    counts = AcceptanceCounter(nextn=3)
    for accepted, drafted in [(0, 0), (3, 3), (1, 3), (0, 3), (3, 3), (2, 2)]:
        counts.add(accepted, drafted)
    report = counts.report()
    assert report.acceptance_histogram == [2, 1, 1, 2]
    assert report.num_spec_steps == 6
    assert report.num_accepted_draft_tokens == 9
    assert report.num_draft_tokens == 14
    assert report.num_spec_tokens == 3
    assert report.mean_acceptance_length == 1 + 9 / 6
    assert counts.tokens == 6 + 9
    assert report.draft_acceptance_rate == 9 / 14
    assert report.per_position_acceptance_rates == [4 / 6, 3 / 6, 2 / 6]


def test_without_drafting_every_step_gives_one_token() -> None:
    manifest = fake_manifest(nextn=0)
    result = Engine(FakePrograms(manifest), manifest).generate([5], SamplingParams(max_tokens=7))
    report = result.metrics.speculative_decoding
    assert report.num_spec_steps == 7
    assert report.mean_acceptance_length == 1
    assert report.draft_acceptance_rate is None
    assert report.per_position_acceptance_rates == []
    assert report.acceptance_histogram == [7]


def test_before_the_first_step_nothing_is_claimed() -> None:
    report = AcceptanceCounter(nextn=1).report()
    assert report.mean_acceptance_length is None
    assert report.draft_acceptance_rate is None
    assert report.per_position_acceptance_rates == [0.0]


def test_a_request_that_ends_within_a_step() -> None:
    """Drafts are counted by whole steps, tokens as far as the request got them."""
    engine, _ = fake_engine(nextn=3)
    params = SamplingParams(max_tokens=3, logprobs=0)
    result = engine.generate([5], params)  # 1 token, then 4, of which 2 stay
    report = result.metrics.speculative_decoding
    assert len(result.token_ids) == result.metrics.output_tokens == 3
    assert [entry.token_id for entry in result.logprobs or ()] == result.token_ids
    assert report.acceptance_histogram == [1, 0, 0, 1]
    assert report.num_accepted_draft_tokens == report.num_draft_tokens == 3
    assert engine.stats.speculative_decoding == report
    assert report.mean_acceptance_length == 3 / 2
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
    assert 10 < many.tokens_per_s <= 100


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
    ("nextn", "right", "warnings"), [(2, False, 1), (2, True, 0), (0, True, 0)]
)
def test_collapsed_acceptance_is_said_once(
    nextn: int, right: bool, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _ = fake_engine(nextn=nextn, max_seq_len=2000, draft_is_right=lambda position: right)
    with caplog.at_level(logging.WARNING):
        engine.generate([5], SamplingParams(max_tokens=1500))
    assert len([r for r in caplog.records if "not being accepted" in r.message]) == warnings
