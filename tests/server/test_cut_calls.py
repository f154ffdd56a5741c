"""A call that a stop string, max_tokens or the model's own end cuts is no call, in any API."""

import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx2
import pytest

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.server.options import ServerOptions
from tests.support.fakes import fake_engine
from tests.support.live_server import live
from tests.support.served import events, saying

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
RUN = {"name": "run", "parameters": PARAMETERS}
BEGUN = '{"command": "rm -rf /tmp/'
FORMS = {
    "hermes": f'<tool_call>{{"name": "run", "arguments": {BEGUN}x/old"}}}}</tool_call>',
    "qwen3_coder": "<tool_call><function=run><parameter=command>\nrm -rf /tmp/x/old\n</parameter>"
    "</function></tool_call>",
    "deepseek_v4": '<｜DSML｜tool_calls><｜DSML｜invoke name="run">'
    '<｜DSML｜parameter name="command" string="true">rm -rf /tmp/x/old</｜DSML｜parameter>'
    "</｜DSML｜invoke></｜DSML｜tool_calls>",
}
HI = [{"role": "user", "content": "hi"}]
USER = {"temperature": 0, "max_tokens": 200}
ASK: dict[str, Any] = {
    CHAT: USER | {"messages": HI, "tools": [{"type": "function", "function": RUN}]},
    MESSAGES: USER | {"messages": HI, "tools": [{"name": "run", "input_schema": PARAMETERS}]},
    RESPONSES: {"temperature": 0, "max_output_tokens": 200, "input": "hi"}
    | {"tools": [{"type": "function"} | RUN]},
}
REASONS = {"stop": "stop_sequence", "length": "max_tokens", "end": "end_turn"}


class Case(NamedTuple):
    """An answer that says something and calls a tool; `raw` is what is left of it."""

    client: httpx2.Client
    engine: Engine
    form: str
    cut: str
    said: str
    raw: str


@pytest.fixture(params=itertools.product(FORMS, REASONS, ("", "I look.")))
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    """Serve an answer whose call is cut."""
    form, cut, said = request.param
    text = said + FORMS[form]
    raw = text[: text.index("x/old")]
    answer = saying(raw + "</s>" if cut == "end" else text)
    engine, _ = fake_engine(max_seq_len=500, **answer)
    settings = ServerOptions(tool_call_parser=form)
    with engine, live(engine, settings) as server, server.client() as client:
        yield Case(client, engine, form, cut, said, raw)


def limit(cut: str, path: str, engine: Engine, raw: str) -> dict[str, Any]:
    """Return the fields of a body by which the call is cut."""
    if cut == "length":
        count = len(engine.encode(raw, add_special_tokens=False))
        return {"max_output_tokens" if path == RESPONSES else "max_tokens": count}
    name = "stop_sequences" if path == MESSAGES else "stop"
    return {name: ["x/old"]} if cut == "stop" else {}


def test_a_cut_call_of_whole_answers(case: Case) -> None:
    client, engine, form, cut, said, raw = case
    content = said or raw

    def ask(path: str) -> Any:
        body = ASK[path] | limit(cut, path, engine, raw)
        return client.post(path, json=body).json()

    (choice,) = ask(CHAT)["choices"]
    assert choice["message"].items() >= {"content": content}.items()
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == ("length" if cut == "length" else "stop")
    assert choice["stop_reason"] == ("x/old" if cut == "stop" else None)
    message = ask(MESSAGES)
    assert message["content"] == [{"type": "text", "text": content}]
    stop = "x/old" if cut == "stop" else None
    assert (message["stop_reason"], message["stop_sequence"]) == (REASONS[cut], stop)
    response = ask(RESPONSES)
    assert (response["status"], response["output"][-1]["status"]) == ("incomplete", "incomplete")
    calls = [item["arguments"] for item in response["output"] if item["type"] == "function_call"]
    assert calls == ([BEGUN] if form == "hermes" else [])
    assert response["incomplete_details"] == (
        {"reason": "max_output_tokens"} if cut == "length" else None
    )


def test_a_cut_call_of_streams(case: Case) -> None:
    """What went out stays, no brace is added, and nothing says that the call is complete."""
    client, engine, form, cut, said, raw = case
    content = said or raw
    wanted = (said, BEGUN) if form == "hermes" else (content, "")

    def ask(path: str) -> list[Any]:
        body = ASK[path] | limit(cut, path, engine, raw) | {"stream": True}
        return events(client.post(path, json=body))

    choices = [event["choices"][0] for event in ask(CHAT)[:-1]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert (text, "".join(call["function"]["arguments"] for call in calls)) == wanted
    assert choices[-1]["finish_reason"] == ("length" if cut == "length" else "stop")
    *rest, end, _ = ask(MESSAGES)
    deltas = [event["delta"] for event in rest if event["type"] == "content_block_delta"]
    text, arguments = ("".join(d.get(key, "") for d in deltas) for key in ("text", "partial_json"))
    assert (text, arguments) == wanted
    assert end["delta"]["stop_reason"] == REASONS[cut]
    told = ask(RESPONSES)
    kinds = [event["type"] for event in told]
    assert "response.function_call_arguments.done" not in kinds
    assert kinds[-1] == "response.incomplete"
    joined = "".join(e["delta"] for e in told if e["type"].endswith("arguments.delta"))
    assert joined == wanted[1]
    (done,) = [e["item"] for e in told if e["type"].endswith("item.done")][-1:]
    assert (done, done["status"]) == (told[-1]["response"]["output"][-1], "incomplete")
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)


def test_a_cut_call_in_python(case: Case) -> None:
    _, engine, form, cut, said, raw = case
    content = said or raw
    fields = limit(cut, CHAT, engine, raw)
    params = SamplingParams(max_tokens=fields.get("max_tokens", 200), stop=fields.get("stop", []))
    options: Any = {"tools": ASK[CHAT]["tools"], "tool_call_parser": form}
    whole = engine.chat(HI, params, **options)
    with engine.chat(HI, params, stream=True, **options) as stream:
        deltas = [delta for chunk in stream for delta in chunk.tool_calls]
        streamed = stream.result()
    arguments = "".join(delta["function"]["arguments"] for delta in deltas)
    assert arguments == (BEGUN if form == "hermes" else "")
    for answer in (whole, streamed):
        assert (answer.content, answer.tool_calls, answer.text) == (content, [], raw)
        assert answer.finish_reason == ("length" if cut == "length" else "stop")
        assert answer.stop_reason == ("x/old" if cut == "stop" else None)


@pytest.mark.parametrize(
    ("more", "reason", "stop"),
    [("</s>", "tool_calls", None), (FORMS["hermes"].replace("old", "new"), "stop", "x/new")],
)
def test_a_call_that_is_closed_needs_no_end_mark(more: str, reason: str, stop: str | None) -> None:
    """And it stays a call if the next one is cut."""
    text = FORMS["hermes"].removesuffix("</tool_call>") + more
    with fake_engine(max_seq_len=500, **saying(text))[0] as engine:
        params = SamplingParams(max_tokens=200, stop=["x/new"])
        answer = engine.chat(HI, params, tools=ASK[CHAT]["tools"], tool_call_parser="hermes")
    (call,) = answer.tool_calls
    assert json.loads(call["function"]["arguments"]) == {"command": "rm -rf /tmp/x/old"}
    assert (answer.content, answer.finish_reason, answer.stop_reason) == ("", reason, stop)
