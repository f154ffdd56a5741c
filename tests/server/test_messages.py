"""The `anthropic` package against a server over fakes, and what bodies become as chats."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from mtpbuild.runtime.server.messages import MessagesBody
from mtpbuild.runtime.server.options import ServerOptions
from tests.support.live_server import Live
from tests.support.served import SAID, TOOL_TEMPLATE, events, saying, served

if TYPE_CHECKING:
    from anthropic import Anthropic

HI: Any = [{"role": "user", "content": "hi"}]
ASK: Any = {"model": "fake", "messages": HI, "max_tokens": 100, "stop_sequences": ["｜end｜"]}
WEATHER: Any = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with served(settings=ServerOptions(key="k"), **saying(SAID, TOOL_TEMPLATE)) as (running, _):
        yield running


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator["Anthropic"]:
    import anthropic  # takes seconds

    transport = server.client()
    with anthropic.Anthropic(
        base_url=server.url, api_key="k", max_retries=0, http_client=transport
    ) as made:
        yield made


def plain(blocks: Any) -> list[Any]:
    """Return a message's blocks without the ids of calls, which are random."""
    return [block.model_dump(exclude={"id"}, exclude_none=True) for block in blocks]


def test_a_message_and_its_stream(client: "Anthropic") -> None:
    told = client.messages.create(**ASK, tools=[WEATHER], extra_body=GREEDY)
    with client.messages.stream(**ASK, tools=[WEATHER], extra_body=GREEDY) as stream:
        final = stream.get_final_message()
    assert plain(final.content) == plain(told.content)
    assert final.stop_reason == told.stop_reason
    count = client.messages.count_tokens(model="fake", messages=HI)
    assert count.input_tokens == told.usage.input_tokens


def test_why_it_ends(client: "Anthropic") -> None:
    ended = client.messages.create(**ASK, extra_body=GREEDY)
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", "｜end｜")
    cut = client.messages.create(**ASK | {"max_tokens": 3}, extra_body=GREEDY)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    quiet: Any = ASK | {"thinking": {"type": "disabled"}}
    shown = client.messages.create(**quiet, extra_body=GREEDY)
    assert [block.type for block in shown.content] == ["text"]
    with client.messages.stream(**quiet, extra_body=GREEDY) as stream:
        assert plain(stream.get_final_message().content) == plain(shown.content)


def test_errors_are_the_packages_own(client: "Anthropic", server: Live) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**ASK | {"model": "other"})
    picture = {"type": "image", "source": {"type": "url", "url": "x"}}
    with pytest.raises(anthropic.BadRequestError, match="no block of type 'image'"):
        client.messages.create(**ASK | {"messages": [{"role": "user", "content": [picture]}]})
    with pytest.raises(anthropic.BadRequestError, match="a server has no tool web"):
        client.messages.create(**ASK, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    with pytest.raises(anthropic.AuthenticationError) as error:
        client.with_options(api_key="wrong").messages.create(**ASK)
    body: Any = error.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
    for name in ("chat_template", "container", "mcp_servers"):
        with pytest.raises(anthropic.BadRequestError, match=f"{name} is not supported"):
            client.messages.create(**ASK, extra_body={name: "x"})
    with server.client(headers={"x-api-key": "k"}) as plain_client:
        for wrong in ({"max_tokens": "x"}, {"chat_template_kwargs": 7}, {"messages": 7}):
            response = plain_client.post("/v1/messages", json=ASK | wrong)
            assert response.status_code == 400
            assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("bearer", "key", "status"),
    [("k", None, 200), (None, "k", 200), ("none", "k", 200), ("k", "none", 200),
     ("none", None, 401), (None, "none", 401), ("none", "none", 401)],
)  # fmt: skip
def test_one_of_two_keys_is_enough(
    server: Live, bearer: str | None, key: str | None, status: int
) -> None:
    """Claude Code sends both if both are set."""
    headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
    headers |= {} if key is None else {"x-api-key": key}
    with server.client(headers=headers) as client:
        assert client.post("/v1/messages", json=ASK).status_code == status


def test_a_stream_counts_its_prompt_once(server: Live) -> None:
    """What was cached is known at its start."""
    counts = []
    with server.client(headers={"x-api-key": "k"}) as client:
        for _ in range(2):
            told = events(client.post("/v1/messages", json=ASK | GREEDY | {"stream": True}))
            counts.append([told[0]["message"]["usage"], told[-2]["usage"]])
    for start, end in counts:
        assert start | {"output_tokens": end["output_tokens"]} == end
    assert counts[1][0]["cache_read_input_tokens"] > 0


def test_a_failure_in_a_stream() -> None:
    with served(**saying(SAID)) as (server, programs), server.client() as client:
        programs.fail = RuntimeError("broken")
        response = client.post("/v1/messages", json=ASK | {"stream": True})
        last = events(response)[-1]
        assert response.text.splitlines()[-3] == "event: error"
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")


def test_what_a_conversation_becomes() -> None:
    body: Any = {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "be brief"}],
        "top_k": 3,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [WEATHER],
        "tool_choice": {"type": "tool", "name": "weather"},
        "messages": [
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "so", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "20"},
                    {"type": "text", "text": "well?"},
                ],
            },
            {"role": "assistant", "content": "It is"},
        ],
    }
    chat = MessagesBody.chat_body(MessagesBody.model_validate(body))
    body["messages"] = body["messages"][:2]
    form = {"type": "json_schema", "schema": {"type": "object"}}
    called = MessagesBody.model_validate(body | {"output_format": form}).chat_body()
    assert called.continue_final_message is None, "a turn that ends in a call is complete"
    schema = {"schema": form["schema"]}
    assert called.response_format == {"type": "json_schema", "json_schema": schema}
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"x": 1}'}}
    assert chat.messages == [
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I look."}],
            "reasoning_content": "so",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "a", "content": "20"},
        {"role": "user", "content": [{"type": "text", "text": "well?"}]},
        {"role": "assistant", "content": "It is"},
    ]
    assert (chat.max_tokens, chat.continue_final_message, chat.settings["top_k"]) == (5, True, 3)
    assert chat.chat_template_kwargs == {"thinking": True, "enable_thinking": True}
    assert chat.tool_choice == {"type": "function", "function": {"name": "weather"}}
    assert chat.tools
    assert chat.tools[0].function.parameters == WEATHER["input_schema"]
