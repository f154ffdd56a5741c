"""The server over fake programs: limits, refusals, failures, clients that go away."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from mtpbuild.runtime import Engine
from mtpbuild.runtime.chat_template import ChatTemplates, Source
from mtpbuild.runtime.server.service import Settings
from mtpbuild.runtime.tokenizer import Tokenizer
from tests.support.fakes import (
    TEMPLATE,
    FakePrograms,
    NextToken,
    backend_tokenizer,
    fake_manifest,
    fake_tokenizer,
    mixed,
    scripted,
)
from tests.support.live_server import Live, live

ASK = {"prompt": "hello", "max_tokens": 5, "temperature": 0}
LONG = {"prompt": "hello", "max_tokens": 4000, "temperature": 0, "ignore_eos": True}
HELLO = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 8}


def fake_engine(
    next_token: NextToken = mixed,
    *,
    tokenizer: Tokenizer | None = None,
    step_s: float = 0.0,
    max_batch: int = 2,
    max_seq_len: int = 5000,
) -> tuple[Engine, FakePrograms]:
    manifest = fake_manifest(max_batch=max_batch, max_seq_len=max_seq_len, prefill_chunk=64)
    programs = FakePrograms(manifest, next_token=next_token, step_s=step_s)
    return Engine(programs, manifest, tokenizer or fake_tokenizer(), prefix_cache=True), programs


@contextlib.contextmanager
def served(
    next_token: NextToken = mixed, settings: Settings | None = None, **flags: Any
) -> Iterator[tuple[Live, FakePrograms]]:
    engine, programs = fake_engine(next_token, **flags)
    with engine, live(engine, settings) as server:
        yield server, programs


def until(condition: Any, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.005)


def events(response: httpx2.Response) -> list[Any]:
    """Return what a stream said, [DONE] as a text."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def fails(response: httpx2.Response, status: int, says: str, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert says in error["message"], error
    assert (error["code"], error["param"]) == (status, param)
    assert error["type"].endswith("Error")


def test_it_loads_serves_and_drains() -> None:
    with live(None) as server, server.client() as client:
        assert client.get("/health").status_code == 503
        fails(client.post("/v1/completions", json=ASK), 503, "being loaded")
        fails(client.get("/v1/models"), 503, "being loaded")
    with served(step_s=0.002) as (server, _), server.client() as client:
        assert client.get("/health").status_code == 200
        answers: list[httpx2.Response] = []
        body = LONG | {"max_tokens": 600}
        thread = threading.Thread(
            target=lambda: answers.append(client.post("/v1/completions", json=body))
        )
        thread.start()
        until(lambda: server.service.open)
        server.service.draining = True
        assert client.get("/health").status_code == 503
        refused = client.post("/v1/completions", json=ASK)
        fails(refused, 503, "shutting down")
        assert refused.headers["retry-after"] == "1"
        thread.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 600


@pytest.mark.parametrize(
    ("body", "says", "param"),
    [
        ({"prompt": 7}, "prompt", "prompt"),
        ({"prompt": ""}, "the prompt is empty", "prompt"),
        ({"prompt": []}, "the prompt is empty", "prompt"),
        ({"prompt": [[1], []]}, "the prompt is empty", "prompt"),
        ({"prompt": [5, 320]}, "token id 320 is outside the vocabulary", "prompt"),
        ({"prompt": [5], "max_tokens": "5"}, "max_tokens", "max_tokens"),
        ({"prompt": [5], "stream": 1}, "stream", "stream"),
        ({"prompt": [5], "max_tokens": 0}, "max_tokens must be", "max_tokens"),
        ({"prompt": [5], "max_tokens": 5000}, "5001 were asked for (1 in the", "max_tokens"),
        ({"prompt": [5] * 5000}, "5000 tokens, this engine takes at most 4999", "prompt"),
        ({"prompt": [5], "n": 0}, "n: ", "n"),
        ({"prompt": [5], "temperature": -1}, "temperature must be", "temperature"),
        ({"prompt": [5], "top_p": 2.0}, "top_p must be", "top_p"),
        ({"prompt": [5], "logprobs": 6}, "logprobs must be", "logprobs"),
        ({"prompt": [5], "stop": [7]}, "stop", "stop"),
        ({"prompt": [5], "stop": [""]}, "a stop string is empty", "stop"),
        ({"prompt": [5], "seed": -1}, "seed must be", "seed"),
        ({"prompt": [5], "stream_options": {}}, "needs stream", "stream_options"),
        ({"prompt": [5], "echo": True}, "echo is not supported", "echo"),
        ({"prompt": [5], "presence_penalty": 2.5}, "presence_penalty", "presence_penalty"),
        ({"prompt": [5], "frequency_penalty": "1"}, "frequency_penalty", "frequency_penalty"),
        ({"prompt": [5], "repetition_penalty": 0}, "repetition_penalty", "repetition_penalty"),
        ({"prompt": [5], "logit_bias": {"5": 101}}, "logit_bias", "logit_bias"),
        ({"prompt": [5], "logit_bias": {"a": 1}}, "'a' is no id", "logit_bias"),
        # An engine that has none:
        ({"prompt": [5], "presence_penalty": 1}, "not supported by this eng", "presence_penalty"),
        ({"prompt": "\ud800"}, "not valid Unicode", "prompt"),
    ],
)
def test_what_a_client_gets_wrong(body: dict[str, Any], says: str, param: str) -> None:
    with served() as (server, programs), server.client() as client:
        content = json.dumps(body).encode()
        response = client.post(
            "/v1/completions", content=content, headers={"Content-Type": "application/json"}
        )
        fails(response, 400, says, param)
        assert programs.steps == 0


def test_messages_that_can_not_be() -> None:
    with served() as (server, _), server.client() as client:

        def refused(says: str, **body: Any) -> None:
            response = client.post("/v1/chat/completions", json=HELLO | body)
            assert response.status_code == 400, response.text
            assert says in response.json()["error"]["message"]

        refused("messages is empty", messages=[])
        refused("role must be a text, not 7", messages=[{"role": 7, "content": "hi"}])
        refused("role must be a text", messages=[{"content": "hi"}])
        refused("messages.0", messages=["hi"])
        refused("no role robot", messages=[{"role": "robot", "content": "hi"}])
        refused(
            "only parts of text", messages=[{"role": "user", "content": [{"type": "image_url"}]}]
        )
        refused("top_logprobs needs", top_logprobs=2)
        refused("shows no form of tool calls", tools=[{"function": {"name": "f"}}])
        refused("shows no form", tool_choice="required", tools=[{"function": {"name": "f"}}])
        refused("take no grammar", response_format={"type": "json_object"})
        refused("seed: ", seed="x")
        assert client.post("/v1/chat/completions", content=b"{").status_code == 400
        fails(client.post("/v1/completions", json=ASK | {"model": "x"}), 404, "`x`", "model")
        fails(client.get("/nothing"), 404, "Not Found")
        fails(client.get("/v1/completions"), 405, "Method Not Allowed")


def test_parts_of_text_are_one_text() -> None:
    with served() as (server, _), server.client() as client:
        parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        one = client.post(
            "/v1/chat/completions", json=HELLO | {"messages": [{"role": "user", "content": parts}]}
        ).json()
        two = client.post(
            "/v1/chat/completions",
            json=HELLO | {"messages": [{"role": "user", "content": "hel\nlo"}]},
        ).json()
        assert one["choices"] == two["choices"]


def test_the_key() -> None:
    with served(settings=Settings(api_key="s3cret")) as (server, _), server.client() as client:
        for headers in ({}, {"Authorization": "Bearer S3cret"}, {"Authorization": "s3cret"}):
            fails(client.post("/v1/completions", json=ASK, headers=headers), 401, "API key")
            fails(client.get("/metrics", headers=headers), 401, "API key")
        assert client.get("/health").status_code == client.get("/").status_code == 200
        assert client.get("/version").json()["version"]
        key = {"Authorization": "Bearer s3cret"}
        assert client.post("/v1/completions", json=ASK, headers=key).status_code == 200


def test_bodies_that_are_too_long_or_do_not_come() -> None:
    settings = Settings(max_body=1000, body_timeout=0.2)
    with served(settings=settings) as (server, _), server.client() as client:
        fails(client.post("/v1/completions", content=b"x" * 1001), 413, "longer than 1000 bytes")

        def pieces() -> Iterator[bytes]:
            yield b'{"prompt": "'
            for _ in range(3):
                yield b"x" * 400

        def slowly() -> Iterator[bytes]:
            yield b'{"prompt": "'
            time.sleep(0.5)

        fails(client.post("/v1/completions", content=pieces()), 413, "longer than 1000 bytes")
        fails(client.post("/v1/completions", content=slowly()), 408, "body did not come")


def test_no_page_of_another_origin_may_ask() -> None:
    asked = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
    with served() as (server, _), server.client() as client:
        response = client.options("/v1/completions", headers=asked)
        assert "access-control-allow-origin" not in response.headers
    settings = Settings(cors=("http://a.example",), api_key="k")
    with served(settings=settings) as (server, _), server.client() as client:
        response = client.options("/v1/completions", headers=asked)
        assert response.headers["access-control-allow-origin"] == "http://a.example"


def test_the_queue_has_an_end() -> None:
    with (
        served(settings=Settings(max_queue=1), step_s=0.002, max_batch=1) as (server, _),
        server.client() as client,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(2):
            stack.enter_context(
                client.stream("POST", "/v1/completions", json=LONG | {"stream": True})
            )
        until(lambda: server.service.open == 2)
        refused = client.post("/v1/completions", json=ASK)
        fails(refused, 429, "wait already")
        assert refused.headers["retry-after"] == "1"
        fails(client.post("/v1/completions", json=ASK | {"n": 3}), 429, "wait already")


def test_a_request_that_takes_too_long() -> None:
    settings = Settings(request_timeout=0.1)
    with served(settings=settings, step_s=0.01) as (server, programs), server.client() as client:
        fails(client.post("/v1/completions", json=LONG), 408, "took too long")
        told = events(client.post("/v1/completions", json=LONG | {"stream": True}))
        assert "took too long" in told[-1]["error"]["message"]
        until(lambda: server.service.open == 0)
        steps = programs.steps
        time.sleep(0.1)
        assert programs.steps <= steps + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_client_that_goes_away(stream: bool, waits: bool) -> None:
    """Its request ends within a step, also one that still waits for a slot."""
    with served(step_s=0.01, max_batch=1) as (server, programs), server.client() as client:
        with contextlib.ExitStack() as stack:
            if waits:
                body = LONG | {"stream": True}
                stack.enter_context(client.stream("POST", "/v1/completions", json=body))
                until(lambda: programs.steps > 2)
            engine = server.service.engine
            assert engine is not None
            with contextlib.suppress(httpx2.ReadTimeout), server.client() as other:
                body, brief = LONG | {"stream": stream}, httpx2.Timeout(5, read=0.1)
                with other.stream("POST", "/v1/completions", json=body, timeout=brief):
                    until(lambda: server.service.open == 1 + waits)
            until(lambda: server.service.open == waits)
            until(lambda: engine.stats.requests_waiting == 0)
            assert engine.stats.requests_running == waits
        until(lambda: server.service.open == 0)
        steps = programs.steps
        time.sleep(0.05)
        assert programs.steps <= steps + 1


def test_a_step_that_fails_and_an_engine_that_can_not_go_on() -> None:
    with served(step_s=0.005) as (server, programs), server.client() as client:
        gone = threading.Event()
        server.service.on_failure = gone.set
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            programs.fail = RuntimeError("device lost")
            rest = [line for line in lines if line]
        assert "device lost" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
        assert gone.wait(10), "the probe fails too"
        assert client.get("/health").status_code == 503
        fails(client.post("/v1/completions", json=ASK), 503, "device lost")


def test_a_step_that_fails_once() -> None:
    with served() as (server, programs), server.client() as client:
        step = programs.step

        def once(*args: Any) -> Any:
            programs.step = step  # type: ignore[method-assign]
            raise RuntimeError("a hiccup")

        programs.step = once  # type: ignore[method-assign, assignment]
        fails(client.post("/v1/completions", json=ASK), 500, "a hiccup")
        assert client.post("/v1/completions", json=ASK).status_code == 200
        assert client.get("/health").status_code == 200


def saying(text: str, template: str = TEMPLATE) -> dict[str, Any]:
    """An engine whose answer to HELLO is this text, over and over."""
    tokenizer = Tokenizer(
        backend_tokenizer(),
        chat_template=ChatTemplates({"default": Source("x", template)}, {"bos_token": "<s>"}),
        bos_token="<s>",
    )
    prompt = tokenizer.encode(
        tokenizer.chat_prompt(HELLO["messages"], tools=None),  # type: ignore[arg-type]
        add_special_tokens=False,
    )
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return {"next_token": scripted(len(prompt), tokens), "tokenizer": tokenizer}


def test_thoughts_are_apart_at_every_cut() -> None:
    """Four tokens a step: markers begin and end anywhere in one."""
    for lead in range(4):
        text = "<think>" + "x" * lead + "so</think>The answer ｜end｜"
        with served(**saying(text)) as (server, _), server.client() as client:
            body = HELLO | {"stop": "｜end｜", "max_tokens": 60}
            message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
            assert message["reasoning_content"] == message["reasoning"] == "x" * lead + "so"
            assert message["content"] == "The answer "
            told = events(client.post("/v1/chat/completions", json=body | {"stream": True}))
            deltas = [event["choices"][0]["delta"] for event in told[:-2]]
            assert told[-1] == "[DONE]"
            assert "".join(d.get("reasoning_content", "") for d in deltas) == "x" * lead + "so"
            assert "".join(d.get("content", "") for d in deltas) == "The answer "
        whole = Settings(thinking=False)
        with served(settings=whole, **saying(text)) as (server, _), server.client() as client:
            message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
            assert message["content"] == text.removesuffix("｜end｜")


TOOL_TEMPLATE = TEMPLATE + "{# <tool_call> #}"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def test_tools() -> None:
    text = 'I look.<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>｜end｜'
    with served(**saying(text, TOOL_TEMPLATE)) as (server, _), server.client() as client:
        body = HELLO | {"stop": "｜end｜", "max_tokens": 100, "tools": TOOLS}
        (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "I look."
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Ulm"}'}
        told = events(client.post("/v1/chat/completions", json=body | {"stream": True}))
        deltas = [
            call
            for event in told[:-2]
            for call in event["choices"][0]["delta"].get("tool_calls", [])
        ]
        assert deltas[0]["function"]["name"] == "weather"
        assert deltas[0]["id"]
        assert not any("id" in delta or "name" in delta["function"] for delta in deltas[1:])
        assert "".join(d["function"]["arguments"] for d in deltas) == '{"city": "Ulm"}'
        assert len(deltas) > 2, "arguments come in pieces"
        plain = client.post("/v1/chat/completions", json=body | {"tool_choice": "none"}).json()
        assert plain["choices"][0]["message"]["content"] == text.removesuffix("｜end｜")


def test_metrics_have_vllms_names() -> None:
    with served() as (server, _), server.client() as client:
        for _ in range(2):
            client.post("/v1/completions", json=ASK | {"max_tokens": 9})
        lines = client.get("/metrics").text.splitlines()
    labels = 'engine="0",model_name="fake"'
    found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert found[f"vllm:generation_tokens_total{{{labels}}}"] == "18.0"
    assert found[f"vllm:spec_decode_num_drafts_total{{{labels}}}"] == "4.0"
    assert found[f"vllm:spec_decode_num_draft_tokens_total{{{labels}}}"] == "12.0"
    assert found[f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}}"] == "12.0"
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [found[f'{per_position}{{{labels},position="{i}"}}'] for i in range(3)] == ["4.0"] * 3
    assert found[f"vllm:time_to_first_token_seconds_count{{{labels}}}"] == "2.0"
    assert found[f"vllm:inter_token_latency_seconds_count{{{labels}}}"] == "4.0"
    ended = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="fake"}'
    assert found[ended] == "2.0"
    assert float(found[f"vllm:prefix_cache_hits_total{{{labels}}}"]) > 0
    assert not any("_created" in name for name in found)
