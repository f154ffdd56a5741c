"""OpenAI's newer API, /v1/responses: the `openai` package against a server over fakes."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from mtpbuild.runtime.server.responses import ResponsesBody
from tests.support.live_server import Live
from tests.support.served import SAID, TOOL_TEMPLATE, events, saying, served

ASK: Any = {"model": "fake", "input": "hi", "temperature": 0, "max_output_tokens": 100}
STOP = {"stop": "｜end｜"}
WEATHER: Any = {
    "type": "function", "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}, "strict": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with served(**saying(SAID, TOOL_TEMPLATE)) as (running, _):
        yield running


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with server.openai() as made:
        yield made


def plain(items: Any) -> list[Any]:
    """Return a response's items without their ids, which are random."""
    return [
        item.model_dump(include={"type", "status", "content", "name", "arguments"})
        for item in items
    ]


def test_a_response_and_its_stream(client: Any) -> None:
    told = client.responses.create(**ASK, tools=[WEATHER], extra_body=STOP)
    assert told.output_text == "I look."
    with client.responses.stream(**ASK, tools=[WEATHER], extra_body=STOP) as stream:
        seen = [*stream]
        final: Any = stream.get_final_response()
    done = [e.item.id for e in seen if e.type == "response.output_item.done"]
    assert plain(final.output)[2] == plain(told.output)[2]
    assert done == [item.id for item in final.output]


def test_an_answer_that_is_cut(client: Any) -> None:
    cut = client.responses.create(**ASK | {"max_output_tokens": 15})
    assert (cut.status, cut.output[-1].type) == ("incomplete", "message")
    assert plain(cut.output)[-1]["status"] == "incomplete"
    assert cut.incomplete_details.reason == "max_output_tokens"
    stream = client.responses.create(**ASK | {"max_output_tokens": 15}, stream=True)
    *_, done, last = stream
    assert (done.type, last.type) == ("response.output_item.done", "response.incomplete")


@pytest.mark.parametrize(
    ("more", "says", "param"),
    [
        ({"previous_response_id": "resp_1"}, "keeps no responses", "previous_response_id"),
        ({"conversation": "c"}, "keeps no responses", "conversation"),
        ({"background": True}, "background is not supported", "background"),
        ({"tools": [{"type": "web_search"}]}, "only functions are supported", "tools"),
        ({"include": ["message.output_text.logprobs"]}, "chat/completions has", "include"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference'", "input.0"),
        ({"tool_choice": "required"}, "tool_choice needs tools", "tool_choice"),
        ({"chat_template_kwargs": 7}, "chat_template_kwargs", "chat_template_kwargs"),
        ({"max_output_tokens": 0}, "max_output_tokens must be", "max_output_tokens"),
        ({"max_output_tokens": 9000}, "maximum context length", "max_output_tokens"),
        ({"input": "x" * 9000}, "maximum context length", "input"),
        ({"input": []}, "input is empty", "input"),
        ({"input": [{"role": "user", "content": 5}]}, "input.0.content must be", "input.0.content"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": 5}]},
         "input.0.output must be", "input.0.output"),
        ({"text": {"format": {"type": "x"}}}, "text.format.type must", "text.format"),
        ({"tools": [{"type": "function", "name": 5}]}, "tools.0.name: ", "tools.0.name"),
        ({"n": 2}, "chat/completions has it", "n"),
        ({"top_logprobs": 2}, "chat/completions has it", "top_logprobs"),
    ],
)  # fmt: skip
def test_what_can_not_be(client: Any, more: Any, says: str, param: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as error:
        client.responses.create(**{**ASK, "extra_body": more})
    assert error.value.param == param


def test_a_failure_in_a_stream() -> None:
    with served(**saying(SAID)) as (server, programs), server.client() as client:
        programs.fail = RuntimeError("broken")
        last = events(client.post("/v1/responses", json=ASK | {"stream": True}))[-1]
        assert (last["type"], last["code"]) == ("error", "500")
        with server.openai() as caller, pytest.raises(openai.APIError, match="engine"):
            list(caller.responses.create(**ASK, stream=True))


def test_what_a_conversation_becomes() -> None:
    form = {"type": "json_schema", "name": "sum", "schema": {"type": "object"}, "strict": True}
    thought = {"type": "reasoning_text", "text": "so"}
    text = {"type": "output_text", "text": "I look."}
    body: Any = {
        "instructions": "be brief",
        "input": [
            {"role": "developer", "content": "in German"},
            {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought]},
            {"type": "message", "role": "assistant", "content": [text]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "20"},
        ],
        "store": True,
        "top_p": 0.5,
        "text": {"format": form},
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "name": "weather"},
    }
    chat = ResponsesBody.chat_body(ResponsesBody.model_validate(body))
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert chat.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "developer", "content": "in German"},
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {
            "role": "assistant",
            "reasoning_content": "so",
            "content": [{"type": "output_text", "text": "I look."}],
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "a", "content": "20"},
    ]
    assert chat.response_format == {"type": "json_schema", "json_schema": form}
    assert chat.settings == {"top_p": 0.5}
    assert chat.tool_choice == {"type": "function", "function": {"name": "weather"}}
    assert chat.tools
    assert chat.tools[0].function.parameters == WEATHER["parameters"]
