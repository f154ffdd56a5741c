"""A loop that launches the next step before it has read the last one: nothing changes but time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpbuild.runtime import Engine, EngineError, SamplingParams
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import StepOutput
from mtpbuild.runtime.engine.streams import Stream
from mtpbuild.runtime.requests.request import FinishReason, Request, Result
from tests.support.fakes import (
    EOS,
    FakePrograms,
    LaggingPrograms,
    continuation,
    fake_manifest,
    fake_tokenizer,
    scripted,
)

LONG = SamplingParams(max_tokens=4000)
WORLD = "def hello(world"


def both(manifest: Manifest, **settings: Any) -> list[Engine]:
    """Return the same engine, in step and overlapping."""
    kinds = (FakePrograms, LaggingPrograms)
    return [Engine(kind(manifest, **settings), manifest, fake_tokenizer()) for kind in kinds]


def lagging(**settings: Any) -> tuple[Engine, LaggingPrograms]:
    manifest = fake_manifest(max_seq_len=5000, **settings)
    programs = LaggingPrograms(manifest)
    return Engine(programs, manifest, fake_tokenizer()), programs


def told(result: Result) -> tuple[object, ...]:
    """All of a result but its times."""
    report = result.metrics.speculative_decoding
    return result.text, result.token_ids, result.from_draft, result.finish_reason, report


def test_a_step_is_launched_before_the_last_one_is_read() -> None:
    engine, programs = lagging(nextn=0)
    assert engine.generate([5], SamplingParams(max_tokens=7)).token_ids == continuation([5], 7)
    assert programs.most_unread == 2
    assert programs.steps == 8  # one too many: it was launched before the end was known


def test_without_overlap_every_step_is_read_first() -> None:
    manifest = fake_manifest(nextn=0)
    programs = LaggingPrograms(manifest)
    engine = Engine(programs, manifest, overlap=False)
    assert engine.generate([5], SamplingParams(max_tokens=7)).token_ids == continuation([5], 7)
    assert (programs.most_unread, programs.steps) == (1, 7)


@settings(max_examples=80, deadline=None)
@given(
    prompts=st.lists(
        st.lists(st.integers(2, 299), min_size=1, max_size=30), min_size=1, max_size=7
    ),
    sizes=st.fixed_dictionaries(
        {"max_batch": st.integers(1, 4), "nextn": st.integers(0, 4), "lookahead": st.integers(0, 4)}
    ),
    wrong=st.sets(st.integers(0, 63)),
    draw=st.data(),
)
def test_any_batch_gives_each_request_its_own_tokens(
    prompts: list[list[int]], sizes: dict[str, Any], wrong: set[int], draw: st.DataObject
) -> None:
    """Whatever is drafted, and however prompts are cut, tokens are those of plain decoding."""
    engines = both(fake_manifest(**sizes), draft_is_right=lambda position: position not in wrong)
    ends, counts = draw.draw(st.sampled_from([(), (7, 8)])), st.integers(1, 70)
    params = [
        SamplingParams(max_tokens=draw.draw(counts), stop_token_ids=ends, logprobs=1)
        for _ in prompts
    ]
    in_step, overlapping = (engine.generate(prompts, params) for engine in engines)
    assert [told(result) for result in overlapping] == [told(result) for result in in_step]
    assert [result.logprobs for result in overlapping] == [result.logprobs for result in in_step]
    for prompt, wanted, result in zip(prompts, params, in_step, strict=True):
        count = len(result.token_ids)
        assert result.token_ids == continuation(prompt, count)
        full = count == min(wanted.max_tokens, 64 - len(prompt))
        assert full or (result.token_ids[-1] in ends and result.finish_reason == "stop")
        assert len(result.logprobs or ()) == count
    for engine in engines:
        assert engine.stats.requests_running == engine.stats.requests_waiting == 0
        assert engine.stats.requests_ended == len(prompts)


@settings(max_examples=80, deadline=None)
@given(
    slots=st.integers(1, 3),
    nextn=st.integers(0, 3),
    acts=st.lists(
        st.tuples(st.sampled_from(["join", "read", "cancel"]), st.integers(0, 9)), max_size=30
    ),
)
def test_requests_join_and_leave_at_any_step(
    slots: int, nextn: int, acts: list[tuple[str, int]]
) -> None:
    """Whatever is cancelled or joins, each request has said a beginning of its own text."""
    manifest = fake_manifest(nextn=nextn, max_batch=slots)
    engine = Engine(LaggingPrograms(manifest, draft_is_right=lambda p: p % 3 != 0), manifest)
    streams: list[tuple[list[int], Stream]] = []
    for act, number in acts:
        if act == "join":
            prompt = [10 + number] * (1 + number)
            params = SamplingParams(max_tokens=3 * number + 1)
            streams.append((prompt, engine.stream(prompt, params)))
        elif streams and act == "read":
            next(streams[number % len(streams)][1], None)
        elif streams:
            streams[number % len(streams)][1].cancel()
    for prompt, stream in streams:
        result = stream.result()
        wanted = continuation(prompt, 3 * (prompt[0] - 10) + 1)
        assert result.token_ids == wanted[: len(result.token_ids)]
        assert len(result.token_ids) == len(wanted) or result.finish_reason == "cancelled"
    assert engine.stats.requests_running == engine.stats.requests_waiting == 0


@pytest.mark.parametrize("nextn", [0, 3])
@pytest.mark.parametrize("length", [1, 30, 31])
def test_there_is_room_at_the_capacity(nextn: int, length: int) -> None:
    """A slot that is full goes on beside one that is not: its last step may be one too many."""
    manifest = fake_manifest(nextn=nextn, max_seq_len=32, max_batch=2)
    in_step, overlapping = (
        engine.generate([[5] * length, [6]], SamplingParams(max_tokens=1000))
        for engine in both(manifest)
    )
    assert [told(result) for result in overlapping] == [told(result) for result in in_step]
    assert overlapping[0].token_ids == continuation([5] * length, 32 - length)
    assert overlapping[0].finish_reason == "length"


@pytest.mark.parametrize("place", range(1, 10))
def test_the_end_of_sequence_may_be_anywhere(place: int) -> None:
    tokens = [*range(100, 100 + place), EOS, *range(200, 220)]
    for engine in both(fake_manifest(), next_token=scripted(2, tokens)):
        result = engine.generate([8, 9])
        assert result.token_ids == tokens[: place + 1]
        assert (result.finish_reason, len(result.from_draft)) == ("stop", place + 1)
        later = SamplingParams(min_tokens=place + 2, max_tokens=place + 5)
        assert engine.generate([8, 9], later).token_ids == tokens[: place + 5]


@pytest.mark.parametrize(
    ("stop", "text"),
    [("world", "def hello("), ("lo(wor", "def hel"), (["zzz", "(w"], "def hello"), ("):", WORLD)],
)
def test_stop_strings(stop: str | list[str], text: str) -> None:
    tokenizer = fake_tokenizer()
    tokens = tokenizer.encode(f"{WORLD}): return", add_special_tokens=False)
    says = scripted(len(tokenizer.encode("x")), tokens)
    in_step, overlapping = (
        engine.generate("x", SamplingParams(stop=stop))
        for engine in both(fake_manifest(), next_token=says)
    )
    assert told(overlapping) == told(in_step)
    assert (overlapping.text, overlapping.finish_reason) == (text, "stop")


class Notes:
    """The steps of a request."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, list[int], list[int], int]] = []

    def step(self, request: Request, output: StepOutput, slot: int) -> None:
        row = output.window[slot].tolist(), output.tokens[slot].tolist()
        self.steps.append((request.length, *row, int(output.num_drafts[slot])))

    def end(self, request: Request, reason: FinishReason) -> None:
        pass


def test_observers_see_the_same_steps() -> None:
    seen = []
    for engine in both(fake_manifest(), draft_is_right=lambda position: position % 5 != 0):
        notes = Notes()
        engine.stream([5, 6], SamplingParams(max_tokens=20), observer=notes).result()
        seen.append(notes.steps)
    assert seen[0] == seen[1]
    assert len(seen[0]) > 5


def test_a_cancelled_request_leaves_a_free_slot() -> None:
    engine, programs = lagging()
    stream = engine.stream([5], LONG)
    first = next(stream)
    stream.cancel()
    assert stream.result().token_ids == list(first.token_ids)
    assert stream.result().finish_reason == "cancelled"
    assert engine.generate([6], SamplingParams(max_tokens=9)).token_ids == continuation([6], 9)
    assert programs.steps == 2 + 4  # 9 tokens take 3, and one too many


@pytest.mark.parametrize("where", ["fail", "fail_landing"])
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_failure_ends_all_requests_and_the_engine_goes_on(where: str, steps: int) -> None:
    engine, programs = lagging(max_batch=2)
    streams = [engine.stream([5 + i], LONG) for i in range(3)]
    for _ in range(steps):
        next(streams[0])
    setattr(programs, where, RuntimeError("device lost\nand more"))
    for stream in streams:
        with pytest.raises(EngineError, match=r"a step failed: device lost$"):
            stream.result()
    setattr(programs, where, None)
    asked = SamplingParams(max_tokens=9)
    for prompt, result in zip([[5], [6]], engine.generate([[5], [6]], asked), strict=True):
        assert result.token_ids == continuation(prompt, 9)


def test_an_interrupt_while_waiting_for_tokens() -> None:
    engine, programs = lagging()
    other = engine.stream([6], LONG)
    next(other)
    programs.fail_landing = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([5])
    programs.fail_landing = None
    with pytest.raises(EngineError, match="KeyboardInterrupt"):
        other.result()
    assert engine.generate([5], SamplingParams(max_tokens=3)).token_ids == continuation([5], 3)


def test_closing_with_a_step_in_flight() -> None:
    engine, programs = lagging()
    stream = engine.stream([5], LONG)
    next(stream)
    assert programs.unread
    engine.close()
    with pytest.raises(EngineError, match="was closed"):
        stream.result()
    assert not hasattr(engine._loaded.loop, "programs")


def test_threads_share_an_engine() -> None:
    prompts, nine = [[5 + i] * (1 + i % 9) for i in range(30)], SamplingParams(max_tokens=9)
    for engine in both(fake_manifest(max_batch=3), step_s=0.0003):
        before = threading.active_count()
        with ThreadPoolExecutor(10) as pool:
            results = [*pool.map(engine.generate, prompts, [nine] * len(prompts))]
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids == continuation(prompt, 9)
        assert threading.active_count() == before
