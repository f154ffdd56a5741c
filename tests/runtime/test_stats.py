"""Acceptance statistics against vLLM's formulas."""

import logging

import pytest

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.requests.stats import AcceptanceCounter
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
    result = engine.generate([5], SamplingParams(max_tokens=3))  # 1 token, then 4, of which 2 stay
    report = result.metrics.speculative_decoding
    assert len(result.token_ids) == result.metrics.output_tokens == 3
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
