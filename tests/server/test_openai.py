"""The `openai` package against a live server with deepseek-tiny: what it gets is the engine's."""

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.server.options import ServerOptions
from tests.support.live_server import Live, live, url_of

pytestmark = pytest.mark.xdist_group("tiny")
SUM: Any = [{"role": "user", "content": "What is 47 + 85?"}]
MODEL = "deepseek-tiny"
CHAT: Any = {"model": MODEL, "messages": SUM, "temperature": 0}
CODE: Any = {"model": MODEL, "prompt": "def f("}
ACCESS = r'127\.0\.0\.1:\d+ - "POST /v1/completions HTTP/1\.1" 200\n'


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Live]:
    with live(engine, ServerOptions(key="k")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with server.openai() as made:
        yield made


def greedy(engine: Engine, prompt: Any, count: int = 200, **settings: Any) -> Any:
    return engine.generate(prompt, SamplingParams(max_tokens=count, **settings))


def test_a_chat(client: Any, engine: Engine) -> None:
    answer = client.chat.completions.create(**CHAT)
    ids = engine.chat_ids(SUM)
    wanted = greedy(engine, ids)
    (choice,) = answer.choices
    thought, output = wanted.text.split("</think>")
    assert (choice.message.content, choice.finish_reason) == (output, "stop")
    assert "132" in output
    assert choice.message.model_extra["reasoning"] == thought
    usage = answer.usage
    assert usage.prompt_tokens == len(ids)
    assert usage.completion_tokens == len(wanted.token_ids)
    reasoning = usage.completion_tokens_details.reasoning_tokens
    assert reasoning == wanted.token_ids.index(3) + 1
    told = answer.model_extra["metrics"]["speculative_decoding"]
    assert told["num_spec_tokens"] == 3
    assert told["mean_acceptance_length"] > 1.5


def test_a_stream_says_what_the_whole_answer_says(client: Any) -> None:
    asked = CHAT | {"logprobs": True, "top_logprobs": 20}
    whole = client.chat.completions.create(**asked)
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    events: list[Any] = [*client.chat.completions.create(**asked, **options)]
    assert len({event.id for event in events}) == 1
    assert events[0].choices[0].delta.role == "assistant"
    told = [event.choices[0] for event in events if event.choices]
    (choice,) = whole.choices
    assert "".join(c.delta.content or "" for c in told) == choice.message.content
    thought = "".join((c.delta.model_extra or {}).get("reasoning", "") for c in told)
    assert thought == choice.message.model_extra["reasoning"]
    assert [c.finish_reason for c in told if c.finish_reason] == [choice.finish_reason]
    streamed = [e for c in told if c.logprobs for e in c.logprobs.content or []]
    assert [e.token for e in streamed] == [e.token for e in choice.logprobs.content or []]
    for entry in streamed:
        likely = [top.logprob for top in entry.top_logprobs]
        assert (len(likely), likely) == (20, sorted(likely, reverse=True))
        assert entry.logprob == likely[0]  # the text is greedy
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_conversation_fills_in_its_new_turns(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "Sort these numbers: 42, 7, 19, 88"}]
    cached = []
    for _ in range(3):
        answer = client.chat.completions.create(**CHAT | {"messages": messages})
        output = answer.choices[0].message.content
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        messages += [{"role": "assistant", "content": output}, *SUM]
    assert cached[0] < cached[1] < cached[2]


def test_choices_and_seeds(client: Any, engine: Engine) -> None:
    """There are more choices than slots; choice i is what seed + i gives."""
    asked = CODE | {"seed": 5, "temperature": 0.8, "max_tokens": 12}
    answer = client.completions.create(**asked, n=6)
    texts = [choice.text for choice in answer.choices]
    defaults: Any = {"temperature": 0.8, "top_p": 1.0, "max_tokens": 12}
    for i, text in enumerate(texts):
        wanted = engine.generate("def f(", SamplingParams(seed=5 + i, **defaults))
        assert text == wanted.text
    assert len(set(texts)) > 1
    assert answer.usage.completion_tokens == 72
    streamed = ["", "", ""]
    for event in client.completions.create(**asked, n=3, stream=True):
        for choice in event.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts[:3]


def test_completions(client: Any, engine: Engine) -> None:
    text, ids = "import os\nimport sys\n\n", engine.encode("def f(")
    prompts: list[Any] = [[text, "def f("], [ids, [5, 6]]]
    for prompt in prompts:
        asked = {"model": MODEL, "prompt": prompt, "temperature": 0}
        answer = client.completions.create(**asked, max_tokens=9, logprobs=1)
        for one, choice in zip(prompt, answer.choices, strict=True):
            assert choice.text == greedy(engine, one, 9).text
            tokens = choice.logprobs.tokens or []
            assert "".join(tokens).startswith(choice.text)
            assert (choice.logprobs.text_offset or [])[1] == len(tokens[0])
    asked = {"model": MODEL, "prompt": text, "temperature": 0, "max_tokens": 40}
    (stopped,) = client.completions.create(**asked, stop=["\n\n", "def"]).choices
    wanted = greedy(engine, text, 40, stop=["\n\n", "def"])
    assert (stopped.text, stopped.finish_reason) == (wanted.text, wanted.finish_reason)
    (model,) = client.models.list().data
    assert model.id == MODEL


def test_what_vllm_adds(client: Any, engine: Engine) -> None:
    extra: Any = {"top_k": 3, "min_p": 0.1, "min_tokens": 9, "acceptance": "rejection"}
    drawn: Any = {"seed": 3, "temperature": 0.7, "max_tokens": 9}
    answer = client.completions.create(**CODE, **drawn, extra_body=extra | {"new": 1})
    wanted = engine.generate("def f(", SamplingParams(**drawn, **extra))
    assert answer.choices[0].text == wanted.text


def test_penalties(client: Any, engine: Engine) -> None:
    asked: dict[str, Any] = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    extra = {"logit_bias": {"56": -100, "7": 1}, "extra_body": {"repetition_penalty": 1.1}}
    answer = client.chat.completions.create(**CHAT, max_tokens=30, logprobs=True, **asked, **extra)
    params = SamplingParams(
        max_tokens=30, repetition_penalty=1.1, logit_bias={56: -100, 7: 1}, **asked
    )
    wanted = engine.generate(engine.chat_ids(SUM), replace(params, logprobs=0))
    plain = engine.generate(engine.chat_ids(SUM), SamplingParams(max_tokens=30))
    (choice,) = answer.choices
    output = [entry.logprob for entry in choice.logprobs.content or []]
    assert output == [entry.logprob for entry in wanted.logprobs or []]
    assert (plain.token_ids[0], 56 in wanted.token_ids) == (56, False)
    with pytest.raises(openai.BadRequestError, match="outside the vocabulary") as error:
        client.completions.create(model=MODEL, prompt="x", logit_bias={"99999999": 1})
    assert error.value.param == "logit_bias"


def test_errors_are_the_packages_own(client: Any, server: Live) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=MODEL, prompt="x", max_tokens=99999)
    assert error.value.param == "max_tokens"
    wrong = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        wrong.completions.create(model=MODEL, prompt="x")


def test_asyncio(server: Live, engine: Engine) -> None:
    async def ask(client: openai.AsyncOpenAI, question: str) -> str:
        messages: Any = [{"role": "user", "content": question}]
        asked = CHAT | {"messages": messages, "stream": True}
        stream: Any = await client.chat.completions.create(**asked)
        return "".join([e.choices[0].delta.content or "" async for e in stream if e.choices])

    async def main() -> list[str]:
        transport = httpx2.AsyncClient(trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="k", http_client=transport
        ) as client:
            return await asyncio.gather(*(ask(client, f"What is {n} + 5?") for n in range(10, 18)))

    answers = asyncio.run(main())
    for n, answer in zip(range(10, 18), answers, strict=True):
        ids = engine.chat_ids([{"role": "user", "content": f"What is {n} + 5?"}])
        assert answer == greedy(engine, ids).text.split("</think>")[1]


@pytest.mark.parametrize(
    ("signals", "count", "code", "done"),
    [(1, 400, 0, True), pytest.param(2, 1900, 130, False, marks=pytest.mark.full)],
)
def test_the_process(
    signals: int, count: int, code: int, done: bool, tiny_engine: Callable[..., Path]
) -> None:
    """SIGTERM: who streams gets all tokens, then the process ends with 0; another one ends it."""
    folder = tiny_engine(3)
    command = [sys.executable, "-m", "mtpbuild", "serve", "--engine", str(folder), "--port", "0"]
    body = {"prompt": "x", "ignore_eos": True, "stream": True, "max_tokens": count}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = url_of(process)
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            first = json.loads(next(lines).removeprefix("data: "))
            assert first["choices"]
            for _ in range(signals):
                process.send_signal(signal.SIGTERM)
                time.sleep(0.05)  # one signal, not two that the system makes one of
            seen = set[str]()
            with contextlib.suppress(httpx2.RemoteProtocolError):
                for line in lines:
                    seen.add(line)
            assert ("data: [DONE]" in seen) == done
        assert process.wait(20) == code
        assert re.fullmatch(ACCESS, process.stderr.read())
