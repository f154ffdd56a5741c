"""What requests ask for in vLLM's words: done as vLLM does it, or refused by name."""

import itertools
import json
from typing import Any

import httpx2
import pytest

from mtpbuild.runtime.server.options import ServerOptions
from mtpbuild.runtime.server.protocol import REFUSED
from mtpbuild.runtime.text.chat_template import ChatTemplates, TemplateText
from mtpbuild.runtime.text.tokenizer import Tokenizer
from tests.support.fakes import FakePrograms, backend_tokenizer
from tests.support.model_tokenizers import TEMPLATES
from tests.support.served import ASK, HELLO, TOOL_TEMPLATE, chat, events, fails, saying, served

FORM = {"Content-Type": "application/x-www-form-urlencoded"}
TEMPLATE_FILES = sorted(path.name for path in TEMPLATES.glob("*_like.jinja"))
USER = {"role": "user", "content": "hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


@pytest.mark.parametrize("name", TEMPLATE_FILES)
def test_a_message_without_content(name: str) -> None:
    """Absent and null are an empty text to templates, as vLLM has it."""
    text = (TEMPLATES / name).read_text(encoding="utf-8")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    templates = ChatTemplates({"default": TemplateText("x", text)}, special)
    tokenizer = Tokenizer(backend_tokenizer(), chat_template=templates, bos_token="<s>")
    contents: tuple[dict[str, Any], ...] = ({"content": None}, {}, {"content": ""})
    with served(tokenizer=tokenizer) as (server, _), server.client() as client:

        def tokens(messages: list[dict[str, Any]]) -> list[int]:
            asked = client.post("/tokenize", json={"messages": messages})
            assert asked.status_code == 200, asked.text
            return list(asked.json()["tokens"])

        for content, calls in itertools.product(contents, ([CALL], None)):
            message = {"role": "assistant", "reasoning_content": "so", "tool_calls": calls}
            answer = {"role": "tool", "tool_call_id": "a", "content": "20"} if calls else {}
            rest = [answer] if answer else []
            found = tokens([USER, message | content, *rest])
            output = client.post("/detokenize", json={"tokens": found}).json()["prompt"]
            assert found == tokens([USER, message | {"content": ""}, *rest])
            assert "None" not in output


def test_an_answer_that_was_cut_comes_back() -> None:
    """Inside its thought an answer has no content: the server takes what it has said."""
    template = TOOL_TEMPLATE.replace("m.content", "m.content.split('</think>')[-1]")
    answer = saying("<think>I look and look", template)
    with served(**answer) as (server, _), server.client() as client:
        choice = chat(client, HELLO)
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
        again = [USER, choice["message"], USER]
        response = client.post("/v1/chat/completions", json=HELLO | {"messages": again})
        assert response.status_code == 200, response.text


def test_the_stop_reason_is_the_stop_string() -> None:
    with served(**saying("one two three")) as (server, _), server.client() as client:
        for stop in ("two", ["three", "two"]):
            for body in (HELLO, HELLO | {"stream": True}):
                asked = body | {"stop": stop, "max_tokens": 60}
                response = client.post("/v1/chat/completions", json=asked)
                told = events(response)[-2] if "stream" in body else response.json()
                (choice,) = told["choices"]
                assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "two")
        kept = HELLO | {"stop": "two", "include_stop_str_in_output": True, "max_tokens": 60}
        assert chat(client, kept)["message"]["content"] == "one two"
        assert chat(client, HELLO | {"max_tokens": 2})["stop_reason"] is None
    with served() as (server, _), server.client() as client:
        plain = client.post("/v1/completions", json=ASK | {"return_token_ids": True}).json()
        token = plain["choices"][0]["token_ids"][2]
        stopped = ASK | {"stop_token_ids": [token]}
        (choice,) = client.post("/v1/completions", json=stopped).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)


def test_usage_in_every_event(client: httpx2.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for route, body in (("completions", ASK), ("chat/completions", HELLO)):
        asked = body | {"stream": True, "stream_options": options, "max_tokens": 9}
        *told, last, _ = events(client.post(f"/v1/{route}", json=asked))
        counts = [event["usage"]["completion_tokens"] for event in told]
        assert counts == sorted(counts)
        assert counts[0] < counts[-1] == last["usage"]["completion_tokens"] == 9
        prompts = {event["usage"]["prompt_tokens"] for event in (*told, last)}
        assert prompts == {last["usage"]["prompt_tokens"]}
        alone = asked | {"stream_options": {"continuous_usage_stats": True}}
        *told, _ = events(client.post(f"/v1/{route}", json=alone))
        assert not any("usage" in event for event in told), "as vLLM: only with include_usage"


@pytest.mark.parametrize("echo", [False, True])
def test_the_first_event_has_the_ids_of_the_prompt(echo: bool, client: httpx2.Client) -> None:
    prompt = client.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]
    body = ASK | {"return_token_ids": True, "stream": True, "echo": echo}
    *told, _ = events(client.post("/v1/completions", json=body))
    firsts = [event["choices"][0].get("prompt_token_ids") for event in told]
    assert firsts == [prompt] + [None] * (len(told) - 1)


@pytest.mark.parametrize("name", [*REFUSED, "reasoning_effort"])
def test_a_field_that_would_change_the_answer_is_refused(
    name: str, client: httpx2.Client, programs: FakePrograms
) -> None:
    steps, value = programs.steps, "low" if name == "reasoning_effort" else ["x"]
    response = client.post("/v1/chat/completions", json=HELLO | {name: value})
    fails(response, 400, f"{name} is not supported: ", name)
    assert programs.steps == steps
    nothing = client.post("/v1/chat/completions", json=HELLO | {name: None})
    assert nothing.status_code == 200


def test_stop_lists_have_an_end(client: httpx2.Client) -> None:
    stops = [f"word {number}" for number in range(65)]
    fails(client.post("/v1/completions", json=ASK | {"stop": stops}), 400, "of 64 at", "stop")
    assert client.post("/v1/completions", json=ASK | {"stop": stops[:64]}).status_code == 200


def test_curl_needs_no_header(client: httpx2.Client) -> None:
    for headers in (FORM, {"Content-Type": "text/plain"}, {}):
        body = json.dumps(ASK).encode()
        assert client.post("/v1/completions", content=body, headers=headers).status_code == 200


def test_who_may_call_the_server_what() -> None:
    """A page that lets its own name point here is of the same origin to browsers."""
    settings = ServerOptions(allowed_hosts=["Box.example"])
    with served(settings=settings) as (server, _), server.client() as client:

        def ask(host: str, **headers: str) -> httpx2.Response:
            return client.post("/v1/completions", json=ASK, headers={"Host": host} | headers)

        for host in ("localhost:8000", "127.0.0.1", "[::1]:80", "box.EXAMPLE", "192.0.2.7:8000"):
            assert ask(host).status_code == 200, host
        for host in ("evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"):
            fails(ask(host), 403, "allowed_hosts")
            assert client.get("/", headers={"Host": host}).status_code == 403
        fails(ask("[::1"), 400, "Host")
        # A browser that does not send Sec-Fetch-Site:
        fails(ask("127.0.0.1", Origin="http://evil.example"), 403, "another origin")
        assert ask("127.0.0.1:80", Origin="http://127.0.0.1:80").status_code == 200
    with (
        served(settings=ServerOptions(allowed_hosts=["*"])) as (server, _),
        server.client() as client,
    ):
        assert ask("any.example").status_code == 200


def test_small_routes() -> None:
    with served() as (server, _), server.client() as client:
        assert client.head("/health").status_code == client.head("/ping").status_code == 200
        assert client.get("/ping").status_code == client.post("/ping").status_code == 200
        fails(client.get("/v1/models/some/one"), 404, "`some/one`", "model")

        def cached() -> int:
            body = ASK | {"prompt": "a prompt of some tokens"}
            usage = client.post("/v1/completions", json=body).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert (cached(), cached() > 0) == (0, True)
        assert client.post("/reset_prefix_cache").status_code == 200
        assert cached() == 0


def test_tokens_of_a_text_and_back(client: httpx2.Client) -> None:
    bare = {"prompt": "größer", "add_special_tokens": False}
    ids = client.post("/tokenize", json=bare).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "größer"}
    fails(client.post("/detokenize", json={"tokens": [320]}), 400, "outside", "tokens")
    fails(client.post("/tokenize", json={"prompt": "x", "model": "y"}), 404, "`y`", "model")
    assert client.post("/tokenize", json={}).status_code == 400
