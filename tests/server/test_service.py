"""The server over fake programs: limits, refusals, failures, clients that go away."""

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from mtpbuild.runtime import Engine
from mtpbuild.runtime.requests.request import Chunk
from mtpbuild.runtime.server import errors
from mtpbuild.runtime.server.answers import AnswerChoice, merge_streams
from mtpbuild.runtime.server.options import ServerOptions
from tests.support.fakes import FakePrograms, backend_tokenizer, fake_manifest, fake_tokenizer
from tests.support.live_server import live, until
from tests.support.served import (
    ASK,
    HELLO,
    LONG,
    TOOL_TEMPLATE,
    TOOLS,
    chat,
    events,
    fails,
    metrics,
    saying,
    served,
)


def test_it_loads_serves_and_drains() -> None:
    with live(None) as server, server.client() as client:
        assert client.get("/health").status_code == 503
        fails(client.post("/v1/completions", json=ASK), 503, "being loaded")
        fails(client.get("/v1/models"), 503, "being loaded")
    pool = ThreadPoolExecutor(1)
    with pool, served(step_s=0.002) as (server, _), server.client() as client:
        assert client.get("/health").status_code == 200
        answer = pool.submit(client.post, "/v1/completions", json=LONG | {"max_tokens": 600})
        until(lambda: server.service.open)
        server.service.draining = True
        assert client.get("/health").status_code == 503
        refused = client.post("/v1/completions", json=ASK)
        fails(refused, 503, "shutting down")
        assert refused.headers["retry-after"] == "1"
        assert answer.result().json()["usage"]["completion_tokens"] == 600


@pytest.mark.parametrize(
    ("body", "says", "param"),
    [
        ({"prompt": 7}, "prompt", "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "the prompt is empty", "prompt"),
        ({"prompt": [-1]}, "prompt: item 0 must be a token id, which is a whole", "prompt"),
        ({"prompt": [[5, "a"]]}, "item 0 must be a token id, which is a whole", "prompt"),
        ({"prompt": [[5], 6]}, "prompt: item 1 must be a list of token ids, not 6", "prompt"),
        ({"prompt": ["a", 6]}, "prompt: item 1 must be a text, not 6", "prompt"),
        ({"prompt": []}, "the prompt is empty", "prompt"),
        ({"prompt": [[1], []]}, "the prompt is empty", "prompt"),
        ({"prompt": [5, 320]}, "token id 320 is outside the vocabulary", "prompt"),
        ({"prompt": [5], "max_tokens": "5"}, "max_tokens", "max_tokens"),
        ({"prompt": [5], "stream": 1}, "stream", "stream"),
        ({"prompt": [5], "max_tokens": 0}, "max_tokens must be", "max_tokens"),
        ({"prompt": [5], "max_tokens": 5000}, "5001 were asked for (1 in the", "max_tokens"),
        ({"prompt": [5] * 5000}, "5000 tokens, this engine takes at most 4999", "prompt"),
        ({"prompt": [5] * 5000}, "maximum context length is 5000 tokens", "prompt"),
        ({"prompt": [5], "n": 0}, "n: ", "n"),
        ({"prompt": [5], "temperature": -1}, "temperature must be", "temperature"),
        ({"prompt": [5], "top_p": 2.0}, "top_p must be", "top_p"),
        ({"prompt": [5], "logprobs": 21}, "logprobs must be", "logprobs"),
        ({"prompt": [5], "stop": [7]}, "stop", "stop"),
        ({"prompt": [5], "stop": [""]}, "a stop string is empty", "stop"),
        ({"prompt": [5], "seed": 2**64}, "seed must be", "seed"),
        ({"prompt": [5], "stream_options": {}}, "needs stream", "stream_options"),
        ({"prompt": [5], "echo": True, "logprobs": 1}, "with `--score` for", "echo"),
        ({"prompt": [5], "prompt_logprobs": 21}, "prompt_logprobs must", "prompt_logprobs"),
        ({"prompt": [5], "suffix": "x"}, "suffix is not supported: a model continues", "suffix"),
        ({"prompt": [5], "best_of": 2}, "best_of must be n (1) or left out", "best_of"),
        ({"prompt": [5], "presence_penalty": 2.5}, "presence_penalty", "presence_penalty"),
        ({"prompt": [5], "frequency_penalty": "1"}, "frequency_penalty", "frequency_penalty"),
        ({"prompt": [5], "repetition_penalty": 0}, "repetition_penalty", "repetition_penalty"),
        ({"prompt": [5], "logit_bias": {"5": 101}}, "logit_bias", "logit_bias"),
        ({"prompt": [5], "logit_bias": {"a": 1}}, "'a' is no id", "logit_bias"),
        # An engine that has none:
        ({"prompt": [5], "presence_penalty": 1}, "not supported by this eng", "presence_penalty"),
        ({"prompt": "\ud800"}, "not valid Unicode", "prompt"),
        ({"prompt": [5], "structured_outputs": {}}, "", "structured_outputs"),
        ({"prompt": [5], "response_format": {}}, "", "response_format"),
    ],
)
def test_what_a_client_gets_wrong(
    body: dict[str, Any], says: str, param: str, client: httpx2.Client, programs: FakePrograms
) -> None:
    steps, kind = programs.steps, {"Content-Type": "application/json"}
    response = client.post("/v1/completions", content=json.dumps(body).encode(), headers=kind)
    fails(response, 400, says, param)
    assert programs.steps == steps


def test_stop_strings_need_a_tokenizer() -> None:
    manifest = fake_manifest()
    with live(Engine(FakePrograms(manifest), manifest)) as server, server.client() as client:
        response = client.post("/v1/completions", json={"prompt": [5], "stop": "x"})
        fails(response, 400, "stop: this engine was built without a tokenizer", "stop")


def test_a_prompt_whose_logits_are_no_numbers() -> None:
    """It alone ends, by an error; who runs beside it, and the server, go on."""
    with served(step_s=0.002) as (server, programs), server.client() as client:
        programs.damage, long = 300, LONG | {"stream": True, "max_tokens": 400}
        with client.stream("POST", "/v1/completions", json=long) as other:
            until(lambda: programs.steps > 3)
            fails(client.post("/v1/completions", json=ASK | {"prompt": [5, 300]}), 500, "are NaN")
            assert "error" not in other.read().decode()
        assert client.post("/v1/completions", json=ASK).status_code == 200
        assert client.get("/health").status_code == 200


def test_messages_that_can_not_be(client: httpx2.Client) -> None:

    def refused(says: str, **body: Any) -> None:
        response = client.post("/v1/chat/completions", json=HELLO | body)
        assert response.status_code == 400, response.text
        assert says in response.json()["error"]["message"]

    refused("messages is empty", messages=[])
    refused("role must be a text, not 7", messages=[{"role": 7, "content": "hi"}])
    refused("role must be a text", messages=[{"content": "hi"}])
    refused("messages.0", messages=["hi"])
    refused("no role robot", messages=[{"role": "robot", "content": "hi"}])
    refused("only parts of text", messages=[{"role": "user", "content": [{"type": "image_url"}]}])
    refused("top_logprobs needs", top_logprobs=2)
    refused("logprobs must be a whole number in 0..20", logprobs=True, top_logprobs=21)
    refused("writes no calls of tools", tools=[{"function": {"name": "f"}}])
    refused("writes no calls", tool_choice="required", tools=[{"function": {"name": "f"}}])
    refused("take no grammar", response_format={"type": "json_object"})
    refused("seed must be a whole number", seed="x")
    assert client.post("/v1/chat/completions", content=b"{").status_code == 400
    fails(client.post("/v1/completions", json=ASK | {"model": "x"}), 404, "`x`", "model")
    fails(client.get("/nothing"), 404, "Not Found")
    fails(client.get("/v1/completions"), 405, "Method Not Allowed")


def test_parts_of_text_are_one_text(client: httpx2.Client) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    one, two = (
        chat(client, HELLO | {"messages": [{"role": "user", "content": content}]})
        for content in (parts, "hel\nlo")
    )
    assert one == two


def test_the_key() -> None:
    with served(settings=ServerOptions(key="s3cret")) as (server, _), server.client() as client:
        for output in ("", "Bearer S3cret", "s3cret", "Basic s3cret", "Bearer"):
            headers = {"Authorization": output} if output else {}
            fails(client.post("/v1/completions", json=ASK, headers=headers), 401, "API key")
            fails(client.get("/metrics", headers=headers), 401, "API key")
        assert client.get("/health").status_code == client.get("/").status_code == 200
        assert client.get("/version").json()["version"]
        for scheme in ("Bearer", "bearer"):
            key = {"Authorization": f"{scheme} s3cret"}
            assert client.post("/v1/completions", json=ASK, headers=key).status_code == 200


def test_bodies_that_are_too_long_or_do_not_come() -> None:
    settings = ServerOptions(max_body=1000, body_timeout=0.2)
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
    asked["Access-Control-Request-Private-Network"] = "true"
    with served() as (server, _), server.client() as client:
        response = client.options("/v1/completions", headers=asked)
        assert "access-control-allow-origin" not in response.headers
        for site in ("same-site", "cross-site"):
            page = {"Origin": "http://a.example", "Sec-Fetch-Site": site}
            fails(client.post("/v1/completions", json=ASK, headers=page), 403, "another origin")
        own = {"Origin": server.url, "Sec-Fetch-Site": "same-origin"}
        assert client.post("/v1/completions", json=ASK, headers=own).status_code == 200
    settings = ServerOptions(allow_origin=["http://a.example"], key="k")
    with served(settings=settings) as (server, _), server.client() as client:
        response = client.options("/v1/completions", headers=asked)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "http://a.example"
        assert response.headers["access-control-allow-private-network"] == "true"
        named = page | {"Authorization": "Bearer k"}
        assert client.post("/v1/completions", json=ASK, headers=named).status_code == 200


def test_the_queue_has_an_end() -> None:
    with (
        served(settings=ServerOptions(max_queue=1), step_s=0.002, max_batch=1) as (server, _),
        server.client() as client,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(2):
            streamed = client.stream("POST", "/v1/completions", json=LONG | {"stream": True})
            stack.enter_context(streamed)
        until(lambda: server.service.open == 2)
        refused = client.post("/v1/completions", json=ASK)
        fails(refused, 429, "wait already")
        assert refused.headers["retry-after"] == "1"
        refused = client.post("/v1/completions", json=ASK | {"n": 3})
        fails(refused, 429, "3 choices, 2 may run and wait")


def test_many_who_come_at_once() -> None:
    """No more are let in than there is room for, though all have asked before one has begun."""

    async def ask(client: httpx2.AsyncClient) -> int:
        body = LONG | {"max_tokens": 400}
        return (await client.post("/v1/completions", json=body)).status_code

    async def main(url: str) -> list[int]:
        async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
            return await asyncio.gather(*(ask(client) for _ in range(40)))

    with served(settings=ServerOptions(max_queue=3), step_s=0.005) as (server, _):
        statuses = asyncio.run(main(server.url))
        assert Counter(statuses) == {200: 5, 429: 35}
        until(lambda: server.service.open == 0)


def test_a_long_prompt_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it becomes tokens, which takes a while, who asks for something short is answered."""
    begun, answered, in_time = threading.Event(), threading.Event(), list[bool]()
    token_ids = Engine.token_ids

    def wait_and_encode(*given: Any, **more: Any) -> list[int]:
        begun.set()
        in_time.append(answered.wait(20))
        return token_ids(*given, **more)

    pool = ThreadPoolExecutor(1)
    with pool, served(max_seq_len=100_000) as (server, _), server.client() as client:
        monkeypatch.setattr(Engine, "token_ids", wait_and_encode)
        refusal = pool.submit(
            client.post, "/v1/completions", json=ASK | {"prompt": "hi " * 200_000}
        )
        assert begun.wait(20)
        assert client.get("/health").status_code == 200
        answered.set()
        fails(refusal.result(), 400, "this engine takes at most 99999", "prompt")
    assert in_time == [True]


def test_half_a_surrogate_pair_comes_back(client: httpx2.Client) -> None:
    half = "\ud800"

    def post(**body: Any) -> httpx2.Response:
        content = json.dumps(ASK | body).encode()
        kind = {"Content-Type": "application/json"}
        return client.post("/v1/completions", content=content, headers=kind)

    fails(post(model=half), 404, f"`{half}`", "model")
    for name in (half, "x" * 257):
        assert post(request_id=name).json()["error"]["param"] == "request_id"
    assert post(user=half).status_code == 200


def test_closing_what_is_merged_closes_the_streams() -> None:
    closed: list[int] = []

    async def stream(number: int) -> AsyncGenerator[Any, None]:
        try:
            while True:
                yield number
                await asyncio.sleep(0)
        finally:
            closed.append(number)

    async def main(count: int) -> None:
        closed.clear()
        chunks = merge_streams([stream(number) for number in range(count)])
        await anext(chunks)
        await asyncio.sleep(0)
        await chunks.aclose()
        assert sorted(closed) == list(range(count))

    for count in (1, 3):
        asyncio.run(main(count))


def test_every_event_of_a_stream_has_a_choice(client: httpx2.Client) -> None:
    """Clients look at `choices[0]`."""
    for route, body in (("completions", ASK), ("chat/completions", HELLO)):
        *told, done = events(client.post(f"/v1/{route}", json=body | {"stream": True}))
        assert done == "[DONE]"
        assert all(len(event["choices"]) == 1 for event in told)
        assert [event for event in told if event.get("metrics")] == [told[-1]]


def test_a_request_that_takes_too_long() -> None:
    settings = ServerOptions(request_timeout=0.1)
    with served(settings=settings, step_s=0.01) as (server, programs), server.client() as client:
        late = client.post("/v1/completions", json=LONG)
        fails(late, 408, "took too long")
        assert late.headers["x-should-retry"] == "false", "clients would ask twice more"
        told = events(client.post("/v1/completions", json=LONG | {"stream": True}))
        assert "took too long" in told[-2]["error"]["message"]
        assert told[-1] == "[DONE]"
        until(lambda: server.service.open == 0)
        steps = programs.steps
        time.sleep(0.1)
        assert programs.steps <= steps + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_client_that_goes_away(stream: bool, waits: bool) -> None:
    """The request ends within a step, also one that still waits for a slot."""
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
        assert "device lost" in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
        assert rest[-1] == "data: [DONE]"
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


def test_thoughts_are_apart_at_every_cut() -> None:
    """Four tokens a step: markers begin and end anywhere in one."""
    for lead in range(4):
        text = "<think>" + "x" * lead + "so</think>The answer ｜end｜"
        with served(**saying(text)) as (server, _), server.client() as client:
            body = HELLO | {"stop": "｜end｜", "max_tokens": 60}
            message = chat(client, body)["message"]
            assert message["reasoning_content"] == message["reasoning"] == "x" * lead + "so"
            assert message["content"] == "The answer "
            told = events(client.post("/v1/chat/completions", json=body | {"stream": True}))
            deltas = [event["choices"][0]["delta"] for event in told[:-1]]
            assert told[-1] == "[DONE]"
            assert "".join(d.get("reasoning_content", "") for d in deltas) == "x" * lead + "so"
            assert "".join(d.get("content", "") for d in deltas) == "The answer "
            asked = body | {"stream": True, "return_token_ids": True}  # as the page asks
            told = events(client.post("/v1/chat/completions", json=asked))[:-1]
            spans = [span for e in told for span in e["choices"][0].get("spans", [])]
            for kind in ("reasoning", "content"):
                assert "".join(s[0] for s in spans if s[2] == kind) == message[kind]
            assert {draft for _, draft, _ in spans} == {True, False}
        whole = ServerOptions(no_thinking_split=True)
        with served(settings=whole, **saying(text)) as (server, _), server.client() as client:
            message = chat(client, body)["message"]
            assert message["content"] == text.removesuffix("｜end｜")


def test_markers_that_are_special_tokens() -> None:
    """They are no part of a text, and yet they tell what is thought and what is called."""
    backend = backend_tokenizer()
    backend.add_special_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>", "<x>"])
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
    text = f"<think>so</think>I <x>look.{call}｜end｜"
    with served(**saying(text, TOOL_TEMPLATE, backend)) as (server, _), server.client() as client:
        body = HELLO | {"stop": "｜end｜", "max_tokens": 100, "tools": TOOLS}
        message = chat(client, body)["message"]
        assert (message["reasoning"], message["content"]) == ("so", "I look.")
        assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Ulm"}'
        told = events(client.post("/v1/chat/completions", json=body | {"stream": True}))
        deltas = [event["choices"][0]["delta"] for event in told[:-1]]
        assert "".join(d.get("content", "") for d in deltas) == "I look."
        shown = client.post("/v1/chat/completions", json=body | {"skip_special_tokens": False})
        assert shown.json()["choices"][0]["message"]["content"] == "I <x>look."
        length = shown.json()["usage"]["prompt_tokens"]  # by which the text begins anew
        ids = [0, *[5] * (length - 1)]
        prompt = {"prompt": ids, "stop": "｜end｜", "temperature": 0, "max_tokens": 99}
        for skip in (None, True, False):
            asked = prompt | {"echo": True, "skip_special_tokens": skip}
            plain = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
            assert plain.startswith("<s>") == ("</tool_call>" in plain) == (skip is False)
            assert '"city": "Ulm"' in plain


def test_a_prompt_that_is_repeated(client: httpx2.Client) -> None:
    """Each choice begins with it, whole or streamed: a text as it was sent, ids as their text."""
    ids = fake_tokenizer().encode("größer 🙂", add_special_tokens=False)
    for prompt, first in (("größer 🙂", "größer 🙂"), ([0, *ids], "größer 🙂")):
        body = ASK | {"prompt": prompt, "n": 2}
        plain = client.post("/v1/completions", json=body).json()
        told = client.post("/v1/completions", json=body | {"echo": True}).json()
        texts = [first + choice["text"] for choice in plain["choices"]]
        assert [choice["text"] for choice in told["choices"]] == texts
        assert told["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
        streaming = body | {"echo": True, "stream": True}
        *streamed, _ = events(client.post("/v1/completions", json=streaming))
        output = ["", ""]
        for event in streamed:
            output[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert output == texts


def test_how_many_calls_a_chat_may_make() -> None:
    calls = '<tool_call>{"name": "weather", "arguments": {"n": 1}}</tool_call>' * 2
    says = saying(f"{calls} so｜end｜", TOOL_TEMPLATE)
    with served(**says) as (server, _), server.client() as client:
        body = HELLO | {"stop": "｜end｜", "max_tokens": 200, "tools": TOOLS}
        for parallel, count in ((False, 1), (None, 2)):
            choice = chat(client, body | {"parallel_tool_calls": parallel})
            assert choice["finish_reason"] == "tool_calls"
            assert len(choice["message"]["tool_calls"]) == count
            assert choice["message"]["content"] == (None if parallel is False else " so")
        assert chat(client, body | {"tool_choice": "none"})["message"]["content"] == f"{calls} so"


def test_a_template_whose_calls_are_not_known_is_refused_by_name() -> None:
    template = TOOL_TEMPLATE.replace('{"name": "', '<call "')
    with served(**saying("x", template)) as (server, _), server.client() as client:
        response = client.post("/v1/chat/completions", json=HELLO | {"tools": TOOLS})
        fails(response, 400, "in a form that is not known; tool_call_parser names", "tools")


def test_metrics_have_vllms_names() -> None:
    with served() as (server, _), server.client() as client:
        for _ in range(2):
            client.post("/v1/completions", json=ASK | {"max_tokens": 9})
        client.post("/v1/completions", json=ASK | {"n": 2, "max_tokens": 9})
        found, text = metrics(client), client.get("/metrics").text
    at = 'spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="fake",position='
    wanted = {
        "generation_tokens_total": 36, "spec_decode_num_drafts_total": 8,
        "spec_decode_num_draft_tokens_total": 24, "spec_decode_num_accepted_tokens_total": 24,
        f'{at}"0"}}': 8, f'{at}"1"}}': 8, f'{at}"2"}}': 8, "time_to_first_token_seconds_count": 4,
        "inter_token_latency_seconds_count": 8, "request_params_n_sum": 4,
        "request_params_max_tokens_sum": 36,
        'request_success_total{engine="0",finished_reason="length",model_name="fake"}': 4,
        'cache_config_info{block_size="5000",engine="0",model_name="fake",num_gpu_blocks="2"}': 1,
    }  # fmt: skip
    assert {name: float(found[name]) for name in wanted} == wanted
    assert float(found["prefix_cache_hits_total"]) > 0
    assert float(found["iteration_tokens_total_sum"]) > 36, "prompts' tokens are filled in too"
    assert float(found["process_resident_memory_bytes"]) > 0
    assert not any("_created" in name for name in found)
    helps = [line.split(" ", 3) for line in text.splitlines() if line.startswith("# HELP")]
    assert not [name for _, _, name, about in helps if not about.endswith(".")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", ["parse", "serialise"])
def test_what_one_answer_raises_is_its_own(
    place: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/architecture.md lists the places of a request's life; these two are the server's."""
    take, encode_json = AnswerChoice.take, errors.encode_json

    def parse(choice: AnswerChoice, chunk: Chunk) -> Any:
        if choice.params.max_tokens == 13:
            raise RecursionError("too deep")
        return take(choice, chunk)

    def serialise(content: Any) -> bytes:
        if "choices" in content and '"index": 1' in json.dumps(content):
            raise RecursionError("too deep")
        return encode_json(content)

    if place == "parse":
        monkeypatch.setattr(AnswerChoice, "take", parse)
    else:
        monkeypatch.setattr("mtpbuild.runtime.server.answering.encode_json", serialise)
        monkeypatch.setattr(errors, "encode_json", serialise)
    pool = ThreadPoolExecutor(1)
    with pool, served(step_s=0.001) as (server, _), server.client() as client:
        other = pool.submit(client.post, "/v1/completions", json=LONG | {"max_tokens": 300})
        until(lambda: server.service.open)
        unlucky = ASK | {"max_tokens": 13, "n": 2, "stream": stream}
        answer = client.post("/v1/completions", json=unlucky)
        told = events(answer)[-2] if stream else answer.json()
        assert told["error"]["message"] == "the server failed"
        assert answer.status_code == (200 if stream else 500)
        assert other.result().json()["usage"]["completion_tokens"] == 300
        until(lambda: server.service.open == 0)
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json=ASK).status_code == 200
