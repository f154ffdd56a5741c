"""Prompts that begin alike, over fake programs: the same tokens, fewer chunks."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.prefixes import Prefixes, common
from tests.support.fakes import FakePrograms, continuation, fake_manifest

ONE, TWO = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)


def engine(
    max_batch: int = 3, lookahead: int = 1, max_seq_len: int = 64
) -> tuple[Engine, FakePrograms]:
    manifest = fake_manifest(max_batch=max_batch, lookahead=lookahead, max_seq_len=max_seq_len)
    programs = FakePrograms(manifest)
    return Engine(programs, manifest, prefix_cache=True), programs


def filled(programs: FakePrograms) -> int:
    """Return how many rows were filled in since the last call."""
    ahead = programs.lookahead
    count = sum(len(tokens) - ahead for _, _, tokens in programs.chunks)
    programs.chunks.clear()
    return count


def test_a_conversation_fills_in_what_is_new() -> None:
    """Ten turns; each prompt is all that was said before, and five tokens more."""
    own, programs = engine(max_batch=1, max_seq_len=200)
    said: list[int] = []
    for turn in range(10):
        said += range(20 * turn, 20 * turn + 5)
        known = len(said) - 5
        result = own.generate(said, SamplingParams(max_tokens=6))
        assert result.token_ids == continuation(said, 6)
        # The last known token is in no row, the last of the prompt needs none; a row is made again.
        assert filled(programs) == (4 if turn == 0 else 5 + 1)
        assert result.metrics.cached_tokens == max(0, known - 2)
        said += result.token_ids


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**6), slots=st.integers(1, 4), lookahead=st.integers(0, 3))
def test_any_order_gives_each_prompt_its_own_tokens(seed: int, slots: int, lookahead: int) -> None:
    """Prompts that branch from what was said before, several at once, some cancelled."""
    rng = random.Random(seed)
    own, _ = engine(max_batch=slots, lookahead=lookahead)
    texts = [[5, 6, 7, 8]]
    for _ in range(6):
        prompts, streams = [], []
        for _ in range(rng.randint(1, 5)):
            base = rng.choice(texts)
            prompt = base[: rng.randint(1, len(base))] + [
                rng.randint(2, 99) for _ in range(rng.randint(0, 3))
            ]
            prompts.append(prompt[:40])
            streams.append(own.stream(prompts[-1], SamplingParams(max_tokens=rng.randint(1, 12))))
        if rng.random() < 0.5:
            streams[rng.randrange(len(streams))].cancel()
        for prompt, stream in zip(prompts, streams, strict=True):
            got = stream.result()
            assert got.token_ids == continuation(prompt, len(got.token_ids))
            texts.append(prompt + got.token_ids)
    assert own.stats.prefix_queries > 0


def test_a_prompt_that_is_shorter_than_what_was_said_leaves_it_there() -> None:
    own, programs = engine()
    prompt = list(range(10, 30))
    answer = own.generate(prompt, SamplingParams(max_tokens=20)).token_ids
    filled(programs)
    own.generate(prompt, ONE)  # again: all but the last token, less a row
    assert filled(programs) == 1
    own.generate([*prompt, *answer, 3], ONE)
    assert filled(programs) == 2


def test_prompts_at_once_share_the_rows_of_who_runs() -> None:
    """The second and third take a copy of what the first one has filled in."""
    own, programs = engine()
    prompt = list(range(10, 30))
    results = own.generate([[*prompt, n] for n in (1, 2, 3)], [SamplingParams(max_tokens=9)] * 3)
    assert filled(programs) == 20 + 1 + 1
    assert [r.metrics.cached_tokens for r in results] == [0, 19, 19]
    assert programs.copies == [(0, 1), (1, 2)] or programs.copies == [(0, 1), (0, 2)]


def test_who_was_used_longest_ago_goes_first() -> None:
    own, programs = engine()
    a, b, c, d = ([n] * 12 for n in (5, 6, 7, 8))
    for prompt in (a, b, c, a, d):  # d takes the place of b
        own.generate(prompt, ONE)
    filled(programs)
    for prompt, rows in ((a, 1), (c, 1), (d, 1), (b, 11)):
        own.generate(prompt, ONE)
        assert filled(programs) == rows, prompt


def test_rows_of_a_prompt_that_was_cancelled_count() -> None:
    own, programs = engine(max_batch=1)
    prompt = list(range(10, 30))
    stream = own.stream(prompt, ONE)
    own._loop.step()
    own._loop.step()
    stream.cancel()
    assert filled(programs) == 8
    own.generate(prompt, ONE)
    assert filled(programs) == 19 - 7


def test_a_failed_step_leaves_nothing_to_begin_with() -> None:
    own, programs = engine()
    own.generate(list(range(10, 20)), ONE)
    programs.fail = RuntimeError("lost")
    with pytest.raises(Exception, match="lost"):
        own.generate([5], ONE)
    programs.fail = None
    filled(programs)
    own.generate(list(range(10, 20)), ONE)
    assert filled(programs) == 9


def test_without_it_nothing_is_kept() -> None:
    manifest = fake_manifest()
    programs = FakePrograms(manifest)
    own = Engine(programs, manifest)
    for _ in range(2):
        own.generate(list(range(10, 20)), TWO)
        assert filled(programs) == 9
    assert own.stats.prefix_queries == 0


def test_what_two_prompts_have_in_common() -> None:
    assert common([1, 2, 3], [1, 2, 4]) == 2
    assert common([1, 2], [1, 2, 4]) == 2
    assert common([], [1]) == 0
    found = Prefixes(lookahead=3)
    found.keep(0, [1, 2, 3])
    assert found.place([1, 2, 3, 4], 0, [0], []).common == 0  # as many rows are made again
