"""The loop over fake programs: which chunks, steps and moves it runs, and what they give."""

import pytest

from mtpbuild.runtime import SamplingParams
from mtpbuild.runtime.errors import NotFiniteError
from tests.support.fakes import EOS, FakePrograms, continuation, fake_engine, mixed, scripted


def test_prefill_covers_all_but_the_last_token_in_chunks_with_lookahead() -> None:
    engine, programs = fake_engine(prefill_chunk=4, lookahead=2)
    engine.generate(list(range(10, 20)), SamplingParams(max_tokens=1))
    assert programs.chunks == [
        (0, 0, [10, 11, 12, 13, 14, 15]),
        (0, 4, [14, 15, 16, 17, 18, 19]),
        (0, 8, [18, 19, 0]),
    ]


def test_a_prompt_beside_running_requests_has_smaller_chunks() -> None:
    engine, programs = fake_engine(
        prefill_chunk=4, max_batch=2, lookahead=0, chunked_prefill_size=2
    )
    engine.generate([[9], list(range(10, 17))], SamplingParams(max_tokens=3 * 4))
    assert [tokens for _, _, tokens in programs.chunks] == [[10, 11], [12, 13], [14, 15]]
    programs.chunks.clear()
    engine.generate(list(range(20, 27)), SamplingParams(max_tokens=1))
    assert [tokens for _, _, tokens in programs.chunks] == [[20, 21, 22, 23], [24, 25]]


def test_ignore_eos_stop_tokens_and_min_tokens() -> None:
    tokens = [50, EOS, 51, 52, EOS, 53, 54, 55]
    engine, _ = fake_engine(next_token=scripted(1, tokens))

    def run(**settings: object) -> list[int]:
        return engine.generate([9], SamplingParams(**settings)).token_ids  # type: ignore[arg-type]

    assert run() == tokens[:2]
    assert run(ignore_eos=True, max_tokens=7) == tokens[:7]
    assert run(ignore_eos=True, stop_token_ids=[53]) == tokens[:6]
    assert run(min_tokens=3) == tokens[:5]
    assert run(min_tokens=2) == tokens[:2]


def test_every_token_knows_whether_it_was_drafted() -> None:
    engine, _ = fake_engine(nextn=2)
    result = engine.generate([9], SamplingParams(max_tokens=8))
    # The first step has no drafts; each later one accepts two and adds its own.
    assert result.from_draft == [False, True, True, False, True, True, False, True]


def test_a_freed_slot_is_used_again_while_others_run() -> None:
    engine, programs = fake_engine(max_batch=2, nextn=0)
    params = [SamplingParams(max_tokens=n) for n in (12, 4, 4, 4)]
    engine.generate([[5], [6], [7], [8]], params)
    assert programs.steps == 12  # 12 steps in one slot beside 4 + 4 + 4 in the other
    assert programs.slots == [2] * 12
    assert programs.moves == []


def test_who_runs_longest_ends_in_the_first_slot() -> None:
    """Nobody waits: a step shrinks with each request that ends, whichever slot it had."""
    engine, programs = fake_engine(max_batch=4, nextn=0)
    counts = (3, 5, 9, 20)
    params = [SamplingParams(max_tokens=n) for n in counts]
    results = engine.generate([[5], [6], [7], [8]], params)
    assert programs.slots == [4] * 3 + [3] * 2 + [2] * 4 + [1] * 11
    assert programs.moves == [(3, 0), (2, 1)]
    for prompt, count, result in zip((5, 6, 7, 8), counts, results, strict=True):
        assert result.token_ids == continuation([prompt], count)


def test_ranks_share_the_requests() -> None:
    """Each newcomer goes to the rank with the fewest; who runs stays where it is."""
    engine, programs = fake_engine(max_batch=2, nextn=0, ranks=3)
    counts = (9, 3, 9, 9, 9, 3, 5, 5)
    params = [SamplingParams(max_tokens=n) for n in counts]
    prompts = [[n, n] for n in range(5, 13)]
    results = engine.generate(prompts, params)
    began = {tokens[0]: slot for slot, _, tokens in programs.chunks}
    assert began == {5: 0, 6: 2, 7: 4, 8: 1, 9: 3, 10: 5, 11: 3, 12: 5}
    assert programs.steps == 10  # a rank fills in one prompt at a time, and steps in between
    assert programs.moves == [(3, 2), (1, 0)]  # its neighbours have ended
    for prompt, count, result in zip(prompts, counts, results, strict=True):
        assert result.token_ids == continuation(prompt, count)


def test_a_newcomer_goes_to_the_rank_with_the_most_free_slots() -> None:
    engine, programs = fake_engine(max_batch=2, nextn=0, ranks=2)
    first, second = (engine.stream([n, n], SamplingParams(max_tokens=50)) for n in (5, 6))
    next(first)
    next(second)
    second.cancel()
    engine.generate([7, 7], SamplingParams(max_tokens=1))
    assert [slot for slot, _, _ in programs.chunks] == [0, 2, 2]


def test_the_fake_depends_on_all_of_its_history() -> None:
    assert len({mixed([1, 2, 3]), mixed([2, 1, 3]), mixed([1, 2, 4]), mixed([1, 2])}) == 4


def turns(programs: FakePrograms) -> str:
    """Return the order of chunks and steps: cccs is three chunks, then a step."""
    return "".join(programs.turns)


def test_chunks_and_steps_take_turns() -> None:
    """Prompts come while another request runs: between two of its steps is one chunk at most."""
    engine, programs = fake_engine(max_batch=4, nextn=0)
    running = engine.stream([5], SamplingParams(max_tokens=30))
    next(running)
    late = [engine.stream([n] * 15, SamplingParams(max_tokens=3)) for n in (6, 7)]
    assert running.result().token_ids == continuation([5], 30)
    assert turns(programs).startswith("s" + "cs" * 8 + "ss")
    for n, stream in zip((6, 7), late, strict=True):
        assert stream.result().token_ids == continuation([n] * 15, 3)


def test_prompts_are_filled_in_as_they_came() -> None:
    """A long one first: the short ones behind it wait for its chunks, not for its tokens."""
    engine, programs = fake_engine(max_batch=4, nextn=0)
    prompts = [[5] * 17, [6] * 2, [7], [8] * 2]
    engine.generate(prompts, [SamplingParams(max_tokens=9)] * 4)
    assert [tokens[0] for _, _, tokens in programs.chunks] == [5, 5, 5, 5, 6, 8]
    # One with nothing to fill in takes nobody's turn.
    assert turns(programs).startswith("ccccscscs")


def test_a_prompt_that_is_cancelled_takes_no_more_turns() -> None:
    engine, programs = fake_engine(max_batch=2, nextn=0)
    running = engine.stream([5], SamplingParams(max_tokens=30))
    next(running)
    late = engine.stream([6] * 40, SamplingParams(max_tokens=3))
    next(running)
    next(running)
    late.cancel()
    assert engine.stats.requests_running == 1
    running.result()
    assert turns(programs) == "s" + "cs" * 2 + "s" * 27
    assert [chunk.finish_reason for chunk in late] == ["cancelled"]


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_logits_that_are_no_numbers_end_their_request(prefix_cache: bool) -> None:
    """Its slot is cleared, and no rows are kept for later prompts, which may have been its own."""
    engine, programs = fake_engine(limit=1 << 20 if prefix_cache else None, max_batch=2)
    asked, ten = list(range(10, 20)), SamplingParams(max_tokens=10)
    engine.generate(asked, ten)
    programs.damage = 299
    other, damaged = engine.stream(asked[:5], ten), engine.stream([*asked, 299, 7], ten)
    with pytest.raises(NotFiniteError, match="after 0 tokens of the answer are NaN or infinite"):
        damaged.result()
    assert other.result().token_ids == continuation(asked[:5], 10)
    result = engine.generate(asked, ten)
    assert result.token_ids == continuation(asked, 10)
    assert result.metrics.cached_tokens <= 4  # what `other` left
    assert len(programs.cleared) == 1


def test_moves_wait_for_no_prompt() -> None:
    """Who runs moves down beside a prompt that is being filled in, which moves when it begins."""
    engine, programs = fake_engine(max_batch=3, nextn=0)
    first = engine.stream([5], SamplingParams(max_tokens=2))
    second = engine.stream([6], SamplingParams(max_tokens=20))
    next(first)
    third = engine.stream([7] * 20, SamplingParams(max_tokens=20))
    results = [stream.result().token_ids for stream in (first, second, third)]
    counts = zip(([5], [6], [7] * 20), (2, 20, 20), strict=True)
    assert results == [continuation(*each) for each in counts]
    assert programs.moves == [(1, 0), (2, 1), (1, 0)]
