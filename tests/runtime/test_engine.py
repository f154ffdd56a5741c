"""The engine's surface: prompts, streams, threads, asyncio, cancellation, failure."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from mtpbuild.runtime import Chunk, Engine, EngineError, RequestError, SamplingParams
from tests.support.fakes import (
    BOS,
    FakePrograms,
    backend_tokenizer,
    continuation,
    fake_engine,
    fake_manifest,
    fake_tokenizer,
    scripted,
)


def saying(prompt: str, text: str) -> Engine:
    """Return an engine that answers `prompt` with `text`, over and over."""
    tokenizer = fake_tokenizer()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return fake_engine(next_token=scripted(len(tokenizer.encode(prompt)), tokens))[0]


def test_chunks_make_up_the_result() -> None:
    text = "größer 你好 🙂 def hello(world): "
    engine = saying("x", text)
    chunks = list(engine.stream("x", SamplingParams(max_tokens=40)))
    result = engine.generate("x", SamplingParams(max_tokens=40))
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert result.text.startswith(text)
    assert [id for chunk in chunks for id in chunk.token_ids] == result.token_ids
    assert [d for chunk in chunks for d in chunk.from_draft] == result.from_draft
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"
    assert chunks[-1].metrics is not None
    assert chunks[-1].metrics.output_tokens == 40


def test_text_and_ids_and_arrays_are_prompts() -> None:
    engine, _ = fake_engine()
    ids = engine.encode("hello")
    assert ids[0] == BOS
    one = engine.generate("hello", SamplingParams(max_tokens=5))
    assert engine.generate(ids, SamplingParams(max_tokens=5)).token_ids == one.token_ids
    array = np.array(ids)
    assert engine.generate(array, SamplingParams(max_tokens=5)).token_ids == one.token_ids  # type: ignore[call-overload]


def test_a_list_of_prompts_gives_a_list_of_results() -> None:
    engine, _ = fake_engine(max_batch=2)
    params = [SamplingParams(max_tokens=n, seed=n) for n in (3, 4, 5)]
    results = engine.generate([[5], [6, 7], [8]], params)
    assert [len(result.token_ids) for result in results] == [3, 4, 5]
    assert [result.seed for result in results] == [3, 4, 5]
    assert len(engine.generate(["a"])) == 1
    none: list[str] = []
    assert engine.generate(none) == []
    mixed: list[str | list[int]] = ["a", [5]]  # and other sequences are prompts to mypy, too
    assert len(engine.generate(mixed)) == len(engine.generate(("a", "b"))) == 2
    assert engine.generate((5, 6)).token_ids == engine.generate([5, 6]).token_ids
    with pytest.raises(RequestError, match="2 prompts, but 1"):
        engine.generate([[5], [6]], [SamplingParams()])


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("output", "thought", "content"),
    [("<think>def hello</think>return", "def hello", "return"), ("world", "", "world")],
)
def test_a_chats_thought_and_text_are_apart(
    special: bool, output: str, thought: str, content: str
) -> None:
    """Whether `<think>` and `</think>` are special tokens, which texts leave out, or plain ones."""
    backend = backend_tokenizer()
    (backend.add_special_tokens if special else backend.add_tokens)(["<think>", "</think>"])
    tokenizer, messages = fake_tokenizer(backend), [{"role": "user", "content": "hi"}]
    tokens = tokenizer.encode(output, add_special_tokens=False)
    ids = tokenizer.encode(tokenizer.chat_prompt(messages), add_special_tokens=False)
    says = scripted(len(ids), tokens)
    engine, _ = fake_engine(tokenizer, max_seq_len=99, vocab_size=330, next_token=says)
    answer = engine.chat(messages, SamplingParams(len(tokens)))
    assert (answer.reasoning_content, answer.content) == (thought, content)
    assert answer.text == output
    named = {"reasoning_content": thought} if thought else {}
    assert answer.message == {"role": "assistant", "content": content} | named


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "the prompt is empty"), ((), "the prompt is empty"),
     ([5, 320], "token id 320 is outside the vocabulary 0..319"), ([-1], "token id -1 is outside"),
     ([5] * 64, "64 tokens, this engine takes at most 63"),
     ("hello " * 90, "tokens, this engine takes at most 63"), ("\ud800", "not valid Unicode"),
     ([5, "a"], "a prompt is a text or a list of token ids"),
     (b"abc", "a prompt is a text or a list of token ids"),
     (7, "a prompt is a text or a list of token ids"),
     ([5.0], "a prompt is a text or a list of token ids"),
     ([5, 2**64], "token id 18446744073709551616 is outside the vocabulary 0..319"),
     ([5, 10**5000], "token id a number of thousands of digits is outside"),
     ([True], "a prompt is a text or a list of token ids, not .True."),
     ({5: 6}, "a prompt is a text or a list of token ids"),
     (np.array([[5, 6]]), "a prompt is a text or a list of token ids")],
)  # fmt: skip
def test_prompts_that_can_not_be(prompt: object, message: str) -> None:
    engine, programs = fake_engine()
    with pytest.raises(RequestError, match=message):
        engine.stream(prompt)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=message):
        engine.generate([[5], prompt])  # type: ignore[list-item]
    assert programs.steps == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature must be a number in 0..100"),
        ({"temperature": float("nan")}, "temperature must be a number"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"logit_bias": {5: 101}}, "logit_bias of token 5 must be a number in -100..100"),
        ({"logit_bias": {"x": 1}}, "logit_bias must map token ids to numbers, and 'x' is no id"),
        ({"logit_bias": [5]}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": dict.fromkeys(range(301), 1)}, "logit_bias must be of 300 tokens at most"),
        ({"top_k": 2.5}, "top_k"),
        ({"relaxed_topk": 3, "temperature": 0.6}, "relaxed acceptance is for greedy requests"),
        ({"acceptance": "typical"}, "acceptance must be one of strict, rejection"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stop": [""]}, "empty"),
        ({"stop": [5]}, "stop must be a list of str"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be a list of int"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_sampling_params_that_can_not_be(settings: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**settings)  # type: ignore[arg-type]


def test_an_engine_without_tokenizer_takes_ids_only() -> None:
    manifest = fake_manifest()
    engine = Engine(FakePrograms(manifest), manifest)
    result = engine.generate([5], SamplingParams(max_tokens=4))
    assert (result.text, len(result.token_ids)) == ("", 4)
    for call, setting in (
        (lambda: engine.generate("text"), ""),
        (lambda: engine.chat_prompt([]), ""),
        (lambda: engine.generate([5], SamplingParams(stop="x")), "stop"),
    ):
        with pytest.raises(RequestError, match="without a tokenizer") as refused:
            call()
        assert refused.value.setting == setting


def test_chat_prompts_follow_the_template() -> None:
    engine, _ = fake_engine()
    prompt = engine.chat_prompt([{"role": "user", "content": "hi"}])
    assert prompt == "<s>user: hi\nassistant: "
    ids = engine.chat_ids([{"role": "user", "content": "hi"}])
    assert ids == engine.encode(prompt) == engine.encode(prompt, add_special_tokens=False)
    with pytest.raises(RequestError, match="no role robot"):
        engine.chat_prompt([{"role": "robot", "content": "hi"}])
    for role in ({}, {"role": None}, {"role": 7}):
        with pytest.raises(RequestError, match="messages 1: role must be a text, not "):
            engine.chat_prompt([{"role": "user", "content": "hi"}, {"content": "x", **role}])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"toools": []}, "unknown option toools; known: tools, doc.*; did you mean tools[?]"),
     ({"nonsense": 1}, "unknown option nonsense; known: tools, documents, .*kwargs$"),
     ({"max_tokens": 5}, "max_tokens is no option of a chat: give SamplingParams.max_tokens=.*")],
)  # fmt: skip
def test_options_that_nobody_knows(options: dict[str, Any], message: str) -> None:
    engine, _ = fake_engine()
    messages = [{"role": "user", "content": "hi"}]
    for ask in (engine.chat, engine.chat_ids, engine.chat_prompt):
        with pytest.raises(RequestError, match=message):
            ask(messages, **options)


@pytest.mark.parametrize("params", [{"max_tokens": 5}, 5, "x"])
def test_settings_that_are_none(params: Any) -> None:
    engine, _ = fake_engine()
    for ask in (
        lambda: engine.generate([5], params),
        lambda: engine.stream([5], params),
        lambda: engine.chat([{"role": "user", "content": "hi"}], params),
    ):
        with pytest.raises(RequestError, match="settings are given as SamplingParams, not "):
            ask()


def test_a_stream_that_nobody_reads_blocks_nobody() -> None:
    engine, _ = fake_engine()
    slow = engine.stream([5], SamplingParams(max_tokens=30))
    next(slow)
    assert len(engine.generate([6], SamplingParams(max_tokens=5)).token_ids) == 5
    assert slow.result().token_ids == continuation([5], 30)


@pytest.mark.parametrize("way", ["cancel", "close", "with", "drop", "thread"])
def test_cancelling_frees_the_slot(way: str) -> None:
    engine, programs = fake_engine(max_seq_len=5000)
    stream = engine.stream([5], SamplingParams(max_tokens=4000))
    next(stream)
    if way == "with":
        with stream:
            pass
    elif way == "thread":
        thread = threading.Thread(target=stream.cancel)
        thread.start()
        thread.join()
    elif way == "drop":
        del stream
    else:
        getattr(stream, way)()
    assert engine.stats.requests_running == 0
    engine.generate([6], SamplingParams(max_tokens=1))
    assert programs.steps == 2


def test_a_cancelled_stream_ends_with_that_reason() -> None:
    engine, programs = fake_engine()
    running, waiting = engine.stream([5]), engine.stream([6])
    first = next(running)
    waiting.cancel()
    running.cancel()
    rest: list[Chunk] = list(running)
    assert rest[-1].finish_reason == "cancelled"
    assert [chunk.finish_reason for chunk in waiting] == ["cancelled"]
    result = running.result()
    assert result.finish_reason == "cancelled"
    assert result.token_ids == list(first.token_ids)
    assert programs.steps == 1


def test_a_failing_step_reaches_all_who_wait_and_the_engine_goes_on() -> None:
    engine, programs = fake_engine(step_s=0.002, max_seq_len=5000)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            engine.generate([5], SamplingParams(max_tokens=4000))
        except EngineError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    while programs.steps < 3:
        time.sleep(0.001)
    programs.fail = RuntimeError("device lost\nand more")
    for thread in threads:
        thread.join(timeout=10)
    assert [str(error) for error in errors] == ["a step failed: device lost"] * 4
    programs.fail = None
    assert engine.generate([5], SamplingParams(max_tokens=3)).token_ids == continuation([5], 3)


def test_an_interrupted_step_raises_and_ends_the_requests() -> None:
    engine, programs = fake_engine()
    other = engine.stream([6])
    programs.fail = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([5])
    programs.fail = None
    with pytest.raises(EngineError, match="KeyboardInterrupt"):
        next(other)
    assert engine.generate([5], SamplingParams(max_tokens=3)).token_ids == continuation([5], 3)


def test_closing_ends_everything() -> None:
    engine, _ = fake_engine(step_s=0.001, max_seq_len=5000)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.generate, [5], SamplingParams(max_tokens=4000))
        while engine.stats.output_tokens == 0:
            time.sleep(0.001)
        with engine:
            stream = engine.stream([6])
        with pytest.raises(EngineError, match="was closed"):
            waiting.result(timeout=10)
    with pytest.raises(EngineError, match="was closed"):
        next(stream)
    with pytest.raises(EngineError, match="is closed"):
        engine.generate([5])
    engine.close()
    assert engine.failure is None, "it was closed, and can still be asked"


def test_a_step_wakes_asyncio_once_for_all_requests() -> None:
    engine, programs = fake_engine(max_batch=4)
    woken: list[object] = []

    async def ask(prompt: list[int]) -> list[int]:
        stream = engine.astream(prompt, SamplingParams(max_tokens=12))
        return [id async for chunk in stream for id in chunk.token_ids]

    async def main() -> list[list[int]]:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *call: woken.append(call) or wake(*call)  # type: ignore
        return await asyncio.gather(*(ask([5 + i]) for i in range(4)))

    assert asyncio.run(main()) == [continuation([5 + i], 12) for i in range(4)]
    assert 0 < len(woken) <= programs.steps
    engine.close()


def test_asyncio_stays_responsive_and_cancels() -> None:
    engine, programs = fake_engine(step_s=0.005, max_seq_len=5000)

    async def endless() -> None:
        async for _ in engine.astream([5], SamplingParams(max_tokens=4000)):
            pass

    async def main() -> list[int]:
        task = asyncio.create_task(endless())
        while programs.steps < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.stats.requests_running == 0
        steps = programs.steps
        await asyncio.sleep(0.05)
        assert programs.steps <= steps + 1
        stream = engine.astream([6], SamplingParams(max_tokens=4))
        return [id async for chunk in stream for id in chunk.token_ids]

    assert asyncio.run(main()) == continuation([6], 4)
    engine.close()


def test_asyncio_gets_errors() -> None:
    engine, programs = fake_engine()

    async def ask(prompt: str) -> None:
        async for _ in engine.astream(prompt):
            pass

    with pytest.raises(RequestError, match="empty"):
        asyncio.run(ask(""))
    programs.fail = RuntimeError("device lost")
    with pytest.raises(EngineError, match="device lost"):
        asyncio.run(ask("x"))
    engine.close()
