"""What clients send, and what they look for in answers and errors."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
import pytest

from mtpbuild.runtime.server.messages import MessagesBody
from mtpbuild.runtime.server.protocol import NEUTRAL_VALUES, REFUSED
from mtpbuild.runtime.server.responses import ResponsesBody
from tests.support.fakes import EOS, TEMPLATE
from tests.support.served import (
    CALLS,
    HELLO,
    SAID,
    TOOL_TEMPLATE,
    events,
    fails,
    saying,
    served,
)

USER: Any = {"role": "user", "content": "hi"}
DROPS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
    "{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
)
FIRST_ALONE = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}S: {{ messages[0].content }}\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}U: {{ m.content }}\n{% endif %}{% endfor %}"
)
KNOWS = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
STRICT = TEMPLATE.replace("['user'", "['system', 'user'")


def rendered(client: httpx2.Client, messages: list[Any], **more: Any) -> str:
    tokens = client.post("/tokenize", json={"messages": messages} | more).json()["tokens"]
    output: str = client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    return output


EFFORT = DROPS + "{% if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "roles", "wanted"),
    [
        (DROPS, ["developer"], "<s>system: text 0\nuser: hi\n"),
        (DROPS, ["system", "developer"], "<s>system: text 0\nsystem: text 1\nuser: hi\n"),
        (STRICT, ["developer"], "<s>system: text 0\nuser: hi\nassistant: "),
        (KNOWS, ["developer"], "<s>developer: text 0\nuser: hi\n"),
        (FIRST_ALONE, ["developer"], "<s>S: text 0\nU: hi\n"),
        (FIRST_ALONE, ["system", "developer"], "<s>S: text 0\n\ntext 1\nU: hi\n"),
    ],
)
def test_what_a_developer_says_is_in_the_prompt(
    template: str, roles: list[str], wanted: str
) -> None:
    messages = [{"role": role, "content": f"text {n}"} for n, role in enumerate(roles)]
    with served(**saying("x", template)) as (server, _), server.client() as client:
        assert rendered(client, [*messages, USER]) == wanted


@pytest.mark.parametrize(("template", "more"), [(DROPS, ""), (EFFORT, "effort low")])
def test_an_effort_reaches_templates_that_ask_for_it(template: str, more: str) -> None:
    """Claude Code and Codex name one to every model."""
    output = {"role": "user", "content": "hi"}
    message = {"messages": [output], "output_config": {"effort": "low"}, "max_tokens": 3}
    response = {"input": "hi", "reasoning": {"effort": "low"}, "max_output_tokens": 3}
    with served(**saying("x", template)) as (server, _), server.client() as client:
        plain = client.post("/tokenize", json={"messages": [output]}).json()["count"]
        count = plain + len(server.service.engine.encode(more, add_special_tokens=False))
        usage = client.post("/v1/messages", json=message).json()["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count
        usage = client.post("/v1/responses", json=response).json()["usage"]
        assert usage["input_tokens"] == count
        chat = {"messages": [output], "reasoning_effort": "low"}
        asked = client.post("/tokenize", json=chat)
        assert asked.json().get("count") == (count if more else None)


def test_no_effort_is_no_thought() -> None:
    body = ResponsesBody.model_validate({"input": "hi", "reasoning": {"effort": "none"}})
    kwargs = {"reasoning_effort": "none", "thinking": False, "enable_thinking": False}
    assert body.chat_body().chat_template_kwargs == kwargs


@pytest.mark.parametrize(
    ("content", "failed", "given"),
    [("no such file", True, "Error: no such file"), ("no such file", False, "no such file"),
     (None, True, "Error"),
     ([{"type": "text", "text": "x"}], True, [{"type": "text", "text": "Error:"}, "..."])],
)  # fmt: skip
def test_that_a_tool_failed_is_in_the_prompt(content: Any, failed: bool, given: Any) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": content, "is_error": failed}
    asked = {"max_tokens": 5, "messages": [{"role": "user", "content": [result]}]}
    (message,) = MessagesBody.model_validate(asked).chat_body().messages
    if isinstance(given, list):
        given = [given[0], *content]
    assert message == {"role": "tool", "tool_call_id": "a", "content": given}


def test_tools_of_an_item() -> None:
    """Codex gives its tools so; those that are no functions it has beside ours."""
    function = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    space = {"type": "namespace", "name": "home", "tools": [function, {"type": "custom"}]}
    item = {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom"}, space]}
    body = {"input": [item, {"role": "user", "content": "hi"}], "temperature": 0, "stop": "｜end｜"}
    body |= {"top_logprobs": 0, "max_output_tokens": 100}
    output = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>｜end｜'
    with served(**saying(output, TOOL_TEMPLATE)) as (server, _), server.client() as client:
        told = client.post("/v1/responses", json=body)
        assert told.status_code == 200, told.text
        (call,) = told.json()["output"]
        names = [call[name] for name in ("type", "name", "namespace")]
        assert names == ["function_call", "weather", "home"]


def test_thoughts_and_a_text_are_one_message() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]}
    output = {"role": "assistant", "content": "b"}
    body = {"input": [thought, thought, output, thought]}
    chat = ResponsesBody.model_validate(body).chat_body()
    assert chat.messages == [
        {"role": "assistant", "reasoning_content": "x\nx", "content": "b"},
        {"role": "assistant", "reasoning_content": "x"},
    ]


def test_what_is_too_long_is_said_in_the_clients_words() -> None:
    long = {"messages": [{"role": "user", "content": "x" * 6000}]}
    short = {"messages": [USER]}
    with served(max_seq_len=200) as (server, _), server.client() as client:

        def ask(route: str, **body: Any) -> httpx2.Response:
            return client.post(f"/v1/{route}", json=body)

        says = "maximum context length is 200 tokens"
        fails(ask("chat/completions", **long), 400, says, "messages")
        fails(ask("chat/completions", **short, max_tokens=200), 400, says, "max_tokens")
        asked = ask("chat/completions", **short, max_completion_tokens=200)
        fails(asked, 400, says, "max_completion_tokens")
        fails(ask("completions", prompt=[5] * 200), 400, says, "prompt")
        fails(ask("completions", prompt="x" * 600), 400, says, "prompt")
        fails(ask("responses", input="x" * 600), 400, says, "input")
        fails(ask("responses", input="x", max_output_tokens=200), 400, says, "max_output_tokens")
        for path, body in (("", long | {"max_tokens": 5}), ("/count_tokens", long)):
            error = ask(f"messages{path}", **body).json()["error"]
            assert error["type"] == "invalid_request_error"
            assert "prompt is too long: " in error["message"]
            assert " tokens > 200 maximum" in error["message"]
        error = ask("messages", **short, max_tokens=200).json()["error"]
        assert "exceed context limit: " in error["message"]
        for more in ({}, {"max_tokens": 5}):  # all that fits
            told = ask("completions", prompt=[5] * 195, **more).json()
            assert told["usage"]["completion_tokens"] == 5


def test_an_empty_text_is_the_bos(client: httpx2.Client) -> None:
    usage = client.post("/v1/completions", json={"prompt": "", "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == 1


def test_special_tokens_are_added_or_not(client: httpx2.Client) -> None:
    body = {"prompt": "hello", "max_tokens": 1, "return_token_ids": True}
    (with_bos,) = client.post("/v1/completions", json=body).json()["choices"]
    bare = client.post("/v1/completions", json=body | {"add_special_tokens": False})
    (without,) = bare.json()["choices"]
    assert with_bos["prompt_token_ids"] == [0, *without["prompt_token_ids"]]


@pytest.mark.parametrize("name", NEUTRAL_VALUES)
def test_a_refused_field_that_asks_for_nothing(name: str, client: httpx2.Client) -> None:
    assert name in REFUSED
    body = HELLO | {name: NEUTRAL_VALUES[name]}
    assert client.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    "field",
    [{"guided_json": {}}, {"enable_thinking": False}, {"thinking_token_budget": 0}, {"regex": ""},
     {"separate_reasoning": False}],
)  # fmt: skip
def test_values_that_look_like_nothing(field: dict[str, Any], client: httpx2.Client) -> None:
    (name,) = field
    for route in ("chat/completions", "completions"):
        body = HELLO | {"prompt": "x"} | field
        fails(client.post(f"/v1/{route}", json=body), 400, f"{name} is not supported", name)
    fails(client.post("/tokenize", json=HELLO | field), 400, "is not supported", name)


@pytest.mark.parametrize("kind", ["text", "json_object"])
@pytest.mark.parametrize("name", ["schema", "json_schema"])
def test_a_schema_of_another_type(kind: str, name: str, client: httpx2.Client) -> None:
    form = {"type": kind, name: {}}
    response = client.post("/v1/chat/completions", json=HELLO | {"response_format": form})
    fails(response, 400, f"response_format.{name} is not supported", "response_format")


# A template that shows all roles and calls; its model says SAID after the prompt of each request.
AGENT = KNOWS.replace("{{ m.content }}", "{{ m.content }}" + CALLS)
READ: dict[str, Any] = {"name": "weather", "description": "w", "input_schema": {"type": "object"}}
CLAUDE_CODE: dict[str, Any] = {  # the fields of its requests, docs/clients.md has the version
    "model": "fake",
    "max_tokens": 300,
    "stream": True,
    "system": [
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief."},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Weather in Ulm?"}]},
        {"role": "system", "content": "Available agent types: none"},
    ],
    "tools": [READ | {"cache_control": {"type": "ephemeral"}}],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "u"},
}


@contextlib.contextmanager
def agent() -> Iterator[httpx2.Client]:
    """Ask a model that says SAID after its first prompt, whatever its length."""
    begins: list[int] = []
    says = saying(SAID, AGENT)
    output = says["tokenizer"].encode(SAID.removesuffix("｜end｜"), add_special_tokens=False)

    def next_token(history: Sequence[int]) -> int:
        if not begins:
            begins.append(len(history))
        return [*output, EOS][(len(history) - begins[0]) % (len(output) + 1)]

    says["next_token"] = next_token
    with served(**says, max_batch=1) as (server, _), server.client() as client:
        yield client


def test_requests_of_claude_code() -> None:
    with agent() as client:
        counted = {k: CLAUDE_CODE[k] for k in ("model", "system", "messages", "tools", "thinking")}
        count = client.post("/v1/messages/count_tokens", json=counted).json()["input_tokens"]
        told = events(client.post("/v1/messages?beta=true", json=CLAUDE_CODE))
        kinds = [event["type"] for event in told]
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        blocks = [event["content_block"] for event in told if "content_block" in event]
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
        assert (blocks[-1]["name"], told[-2]["delta"]["stop_reason"]) == ("weather", "tool_use")
        usage = told[0]["message"]["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count
        assert client.head("/").status_code == 200


FUNCTION = {"name": "weather", "arguments": '{"city": "Ulm"}'}
CALL = {"id": "c1", "type": "function", "function": FUNCTION}
CLINE: dict[str, Any] = {
    "model": "fake",
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": {"name": "weather", "strict": False}}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "max_tokens": 300,
    "messages": [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sun"}]},
    ],
}
CONTINUE = {k: CLINE[k] for k in ("model", "messages", "stream", "tools", "max_tokens")}
OPEN_WEBUI: dict[str, Any] = {
    "model": "fake",
    "stream": True,
    "max_completion_tokens": 300,
    "messages": [{"role": "user", "content": "hi"}],
    "metadata": {"chat_id": "c"},
}


@pytest.mark.parametrize("body", [CLINE, CONTINUE, OPEN_WEBUI], ids=["Cline", "Continue", "WebUI"])
def test_requests_of_openais_shape(body: dict[str, Any]) -> None:
    with agent() as client:
        models = client.get("/v1/models", headers={"Authorization": "Bearer none"}).json()
        assert [model["id"] for model in models["data"]] == ["fake"]
        *told, done = events(client.post("/v1/chat/completions", json=body))
        assert done == "[DONE]"
        assert not any("error" in event for event in told)
        assert bool(told[-1].get("usage")) == ("stream_options" in body)
        deltas = [choice["delta"] for event in told for choice in event["choices"]]
        assert "I look." in "".join(delta.get("content") or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [c["function"]["name"] for c in calls if "id" in c] == ["weather"] * (
            "tools" in body
        )
