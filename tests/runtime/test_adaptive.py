"""Choosing nextn: against the best fixed one, on drafts that are accepted by chance."""

import random
from collections.abc import Sequence

import pytest

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.engine import adaptive
from mtpbuild.runtime.engine.adaptive import AcceptanceEstimate, AdaptiveNextn, StepTimes
from tests.support.fakes import FakePrograms, continuation, fake_manifest

MOST = 4
SECONDS = (1.0, 1.5, 1.8, 2.2, 2.6)  # of a step, by nextn
GOOD, FAIR = (0.98, 0.96, 0.95, 0.9), (0.8, 0.7, 0.65, 0.6)
POOR, USELESS = (0.5, 0.4, 0.3, 0.2), (0.0, 0.0, 0.0, 0.0)
Kinds = Sequence[Sequence[float]]  # chances of each draft, of texts that take turns


def tokens_per_second(kinds: Kinds, fixed: int | None = None, requests: int = 1) -> float:
    """Simulate 2,000 steps; a text of another kind begins every 100, as another request."""
    rng, chooser = random.Random(1), AdaptiveNextn(MOST)
    tokens, seconds, drafts = 0, 0.0, [0] * requests
    for step in range(2000):
        text = step // 100
        names = [(text, i) for i in range(requests)]
        nextn = chooser.choose(names, requests) if fixed is None else fixed
        record_time = SECONDS[nextn] * rng.uniform(0.9, 1.1)
        seconds += record_time
        judged = [min(drafted, nextn) for drafted in drafts]
        accepted = [run(rng, kinds[text % len(kinds)], count) for count in judged]
        tokens += sum(accepted) + requests
        if fixed is None:
            chooser.record_time(requests, record_time)
            for name, count, drafted in zip(names, accepted, judged, strict=True):
                chooser.add(name, count, drafted)
        drafts = [nextn] * requests
    return tokens / seconds


def run(rng: random.Random, chances: Sequence[float], drafted: int) -> int:
    accepted = 0
    while accepted < drafted and rng.random() < chances[accepted]:
        accepted += 1
    return accepted


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("kind", [GOOD, FAIR, POOR, USELESS])
def test_hardly_slower_than_the_best_fixed_nextn(kind: Sequence[float], requests: int) -> None:
    best = max(tokens_per_second([kind], k, requests) for k in range(MOST + 1))
    # A request of 100 steps spends some on drafts, whatever the last ones showed.
    assert tokens_per_second([kind], None, requests) > 0.94 * best


def test_faster_than_any_fixed_nextn_where_texts_differ() -> None:
    best = max(tokens_per_second([GOOD, POOR], k) for k in range(MOST + 1))
    assert tokens_per_second([GOOD, POOR]) > 1.1 * best


@pytest.mark.parametrize(
    ("before", "now", "share"), [(USELESS, GOOD, 0.94), (POOR, GOOD, 0.94), (GOOD, USELESS, 0.94)]
)
def test_a_request_unlike_the_last_one(
    before: Sequence[float], now: Sequence[float], share: float
) -> None:
    """Of its first 80 steps, in tokens per second, over those of the nextn that is best for it."""
    rng, chooser = random.Random(1), AdaptiveNextn(MOST)
    tokens, seconds = 0, 0.0
    for request, chances, steps in (("first", before, 200), ("second", now, 80)):
        for _ in range(steps):
            nextn = chooser.choose([request], 1)
            chooser.record_time(1, SECONDS[nextn])
            accepted = run(rng, chances, nextn)
            chooser.add(request, accepted, nextn)
            if request == "second":
                tokens, seconds = tokens + accepted + 1, seconds + SECONDS[nextn]
    best = 0.0
    for count, record_time in enumerate(SECONDS):
        chance = expected = 1.0
        for each in now[:count]:
            chance *= each
            expected += chance
        best = max(best, expected / record_time)
    assert tokens / seconds > share * best


def test_times_follow_the_machine_and_forgive_an_interruption() -> None:
    times = StepTimes(2)
    for nextn in (2, 1):
        assert times.next_unmeasured() == nextn
        for trial in range(adaptive.TIMED_STEPS):
            assert not times.seconds
            times.add(nextn, 100.0 if trial == 0 else 1.0 + nextn)  # one was interrupted
    assert times.next_unmeasured() is None
    assert times.seconds == [1, 2, 3]
    times.add(1, 1e6)
    assert times.seconds == pytest.approx([1, 2, 3], rel=0.08)
    for _ in range(100):
        times.add(1, 4.0)  # all steps take twice as long
    assert times.seconds == pytest.approx([2, 4, 6], rel=0.15)


def test_a_time_that_was_guessed_is_measured_when_its_nextn_is_chosen() -> None:
    times = StepTimes(4)
    for nextn, seconds in ((4, 5.0), (2, 3.0)):
        for _ in range(adaptive.TIMED_STEPS):
            times.add(nextn, seconds)
    assert times.seconds == [1, 2, 3, 4, 5]
    for _ in range(adaptive.TIMED_STEPS):
        times.add(0, 2.5)
    assert times.seconds == [2.5, 2, 3, 4, 5]


def test_a_trial_that_was_wrong_is_made_again() -> None:
    """Four drafts never pay here, but their first steps were timed too short.

    By the line through the two trials no other nextn is near.
    """
    seconds, estimate = (1.0, 2.0, 2.9, 3.7, 4.4), (0.85,) * MOST
    rng, chooser, chosen = random.Random(1), AdaptiveNextn(MOST), list[int]()
    for step in range(3000):
        chosen.append(chooser.choose(["one"], 1))
        wrong = 0.7 if step <= adaptive.SETTLING_STEPS + adaptive.TIMED_STEPS else 1.0
        chooser.record_time(1, wrong * seconds[chosen[-1]] * rng.uniform(0.95, 1.05))
        chooser.add("one", run(rng, estimate, chosen[-1]), chosen[-1])
    assert chosen[100:300].count(4) > 150
    assert chosen[-1000:].count(0) > 900


def test_what_was_not_tried_for_long_is_tried_again() -> None:
    estimate = AcceptanceEstimate(2)
    for _ in range(40):
        estimate.add(1, 2)  # first drafts are right, second ones wrong
    _, one, two = estimate.tokens()
    assert one > 1.95
    assert two - one < 0.1
    for _ in range(700):
        estimate.add(1, 1)
    _, one, two = estimate.tokens()
    assert two - one > 0.5


def test_a_new_request_leans_to_what_the_last_ones_showed() -> None:
    """Between a guess and what these showed; it is sure of neither."""
    right, wrong, fresh = (AcceptanceEstimate(1) for _ in range(3))
    guess = fresh.tokens()[1]
    for _ in range(40):
        right.add(1, 1)
        wrong.add(0, 1)
    assert guess < right.successor().tokens()[1] < right.tokens()[1]
    assert wrong.tokens()[1] < wrong.successor().tokens()[1] < guess
    assert max(right.successor().judged) <= adaptive.INHERITED_WEIGHT + adaptive.OPTIMISM


def test_an_engine_tries_two_nextns_and_counts_what_it_drafted() -> None:
    manifest = fake_manifest(nextn=MOST, max_seq_len=1000)
    build = manifest.build.model_copy(update={"adaptive": True})
    manifest = manifest.model_copy(update={"build": build})
    programs = FakePrograms(manifest, draft_is_right=lambda position: position % 3 != 0)
    engine = Engine(programs, manifest)
    prompt = [5, 6, 7]
    result = engine.generate(prompt, SamplingParams(max_tokens=400, ignore_eos=True))
    assert result.token_ids == continuation(prompt, 400)
    trials = adaptive.SETTLING_STEPS + adaptive.TIMED_STEPS
    wanted = [MOST] * (trials - 1) + [MOST // 2] * trials
    assert programs.told[: len(wanted)] == wanted
    drafting = result.metrics.speculative_decoding
    assert drafting.num_spec_tokens == MOST
    assert drafting.num_draft_tokens == sum(
        min(before, now) for before, now in zip((0, *programs.told), programs.told, strict=False)
    )
