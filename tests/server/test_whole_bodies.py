"""What each route answers, whole: each field is compared with a literal, so that none is untested.

Times are 0, ids end in `#`, and deltas in a row are joined.
"""

import re
from importlib.metadata import version
from typing import Any

import httpx2
import pytest

from mtpbuild.runtime import SamplingParams
from mtpbuild.runtime.requests.request import TokenLogprobs
from mtpbuild.runtime.server.answers import AnswerChoice
from mtpbuild.runtime.server.completions import CompletionAnswer
from mtpbuild.runtime.server.protocol import CompletionBody
from tests.support.fakes import fake_tokenizer
from tests.support.served import HELLO, TOOL_TEMPLATE, TOOLS, events, saying, served

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
SAID = f"<think>so</think>I look.{CALL}</s>"
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
GREEDY = {"temperature": 0, "max_tokens": 100}
PROMPT, OUTPUT, THOUGHT = 19, 82, 4  # tokens


def plain(value: Any, key: str = "") -> Any:
    """Return a value without what differs from request to request."""
    if isinstance(value, dict):
        return {name: plain(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, str):
        return re.sub(r"[0-9a-f]{24,32}", "#", value)
    times = ("_ms", "per_second", "created", "created_at")
    return 0 if value and key.endswith(times) else value


def ask(path: str, body: Any, said: str = SAID) -> tuple[Any, list[Any]]:
    """Return the whole answer of a new server, and the events of another one's stream."""
    bodies: list[Any] = []
    for more in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        answer = saying(said, TOOL_TEMPLATE)
        with served(nextn=0, **answer) as (server, _), server.client() as client:
            response = client.post(path, json=body | more)
            assert response.status_code == 200, response.text
            bodies.append(events(response) if more else response.json())
    return plain(bodies[0]), join_deltas(bodies[1])


def join_deltas(told: list[Any]) -> list[Any]:
    """Join deltas in a row that differ in their text alone; numbers must count up."""
    numbers = [event.pop("sequence_number") for event in told if "sequence_number" in event]
    assert numbers == [*range(len(numbers))]
    joined: list[Any] = []
    for event in map(plain, told):
        last = find_text(joined[-1]) if joined else None
        if (found := find_text(event)) and last and found[1] == last[1]:
            (new, name), before = found, last[0]
            text, new[name] = new[name], before[name]
            if event == joined[-1]:
                before[name] += text
                continue
            new[name] = text
        joined.append(event)
    return joined


def find_text(event: Any) -> tuple[dict[str, Any], str] | None:
    """Return the object with a delta's text and its key; None for other events."""
    place = event
    if isinstance(event, dict) and event.get("choices"):
        place = event["choices"][0]
        place = place.get("delta", place)
        place = place["tool_calls"][0]["function"] if "tool_calls" in place else place
    elif isinstance(event, dict) and isinstance(event.get("delta"), dict):
        place = event["delta"]
    names = ("text", "content", "thinking", "partial_json", "arguments", "delta")
    found = [n for n in names if isinstance(place, dict) and isinstance(place.get(n), str)]
    return (place, found[0]) if found else None


def metrics(output: int) -> Any:
    """Return vLLM's metrics of an answer with this number of tokens."""
    counts = {"acceptance_histogram": [output], "num_spec_steps": output}
    rates = {"mean_acceptance_length": 1.0, "draft_acceptance_rate": None}
    none = {"num_accepted_draft_tokens": 0, "num_draft_tokens": 0, "num_spec_tokens": 0}
    times = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms")
    return dict.fromkeys((*times, "tokens_per_second", "forced_tokens"), 0) | {
        "speculative_decoding": counts | rates | none | {"per_position_acceptance_rates": []}
    }


def usage(prompt: int, output: int, thought: int) -> Any:
    """Return what an answer's body says about its tokens, and about its times."""
    tokens = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }
    return {"usage": tokens, "metrics": metrics(output)}


def openai_object(kind: str, name: str, *choices: Any, **more: Any) -> Any:
    head = {"id": f"{name}-#", "object": kind, "created": 0, "model": "fake"}
    return head | {"choices": [*choices]} | more


def test_a_chat() -> None:
    whole, told = ask("/v1/chat/completions", HELLO | GREEDY | {"tools": TOOLS})
    function = {"name": "weather", "arguments": '{"city": "Ulm"}'}
    call = {"id": "call_#", "type": "function", "function": function}
    counts = usage(PROMPT, OUTPUT, THOUGHT)
    message = {
        "role": "assistant", "content": "I look.", "refusal": None, "reasoning_content": "so",
        "reasoning": "so", "tool_calls": [call],
    }  # fmt: skip
    end = {"finish_reason": "tool_calls", "stop_reason": None}
    choice = {"index": 0, "message": message, "logprobs": None} | end
    assert whole == openai_object("chat.completion", "chatcmpl", choice) | counts
    deltas: list[Any] = [
        {"role": "assistant", "content": ""},
        *({"reasoning_content": text, "reasoning": text} for text in "so"),
        {"content": "I look."},
        {"tool_calls": [{"index": 0} | call | {"function": function | {"arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"city": "Ulm"}'}}]},
        {},
    ]
    choices = [
        {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
    ]
    choices[-1] |= end
    kind = ("chat.completion.chunk", "chatcmpl")
    events = [openai_object(*kind, each, usage=None) for each in choices]
    assert told == [*events, openai_object(*kind) | counts, "[DONE]"]


def test_a_chats_tokens() -> None:
    body = HELLO | {"max_tokens": 1, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    whole, told = ask("/v1/chat/completions", body, "ok")
    entry = {"token": "o", "logprob": 0.0, "bytes": [111]}
    end = {"finish_reason": "length", "stop_reason": None, "token_ids": [80]}
    choice = {"index": 0, "logprobs": {"content": [entry | {"top_logprobs": [entry]}]}} | end
    message = {"role": "assistant", "content": "o", "refusal": None}
    ids = {"prompt_token_ids": [0, 86, 84, 261, 27, 222, 73, 74, 66, 84, 84, 74, 84, 85, 66, 79,
                                85, 27, 222]}  # fmt: skip
    counts = usage(PROMPT, 1, 0) | {"metrics": metrics(1) | {"mean_itl_ms": None}}
    wanted = openai_object("chat.completion", "chatcmpl", choice | {"message": message}) | counts
    assert whole == wanted | ids
    first, event, last, _ = told
    assert first["prompt_token_ids"] == ids["prompt_token_ids"]
    spans = {"spans": [["o", False, "content"]], "delta": {"content": "o"}}
    kind = ("chat.completion.chunk", "chatcmpl")
    assert event == openai_object(*kind, choice | spans, usage=None)
    assert last == openai_object(*kind) | counts


def test_a_completion() -> None:
    body = {"prompt": "ab", "logprobs": 1, "return_token_ids": True}
    whole, told = ask("/v1/completions", GREEDY | body | {"max_tokens": 2})
    logprobs = {"tokens": ['"', "}"], "token_logprobs": [0.0, 0.0], "text_offset": [0, 1]}
    logprobs |= {"top_logprobs": [{'"': 0.0}, {"}": 0.0}]}  # type: ignore[dict-item]
    end = {"finish_reason": "length", "stop_reason": None}
    ids = {"token_ids": [3, 94], "prompt_token_ids": [0, 66, 67]}
    choice = {"index": 0, "text": '"}', "logprobs": logprobs} | end | ids
    counts = usage(3, 2, 0)
    assert whole == openai_object("text_completion", "cmpl", choice) | counts
    one, two = ({name: [values[i]] for name, values in logprobs.items()} for i in range(2))
    events: list[Any] = [
        {"text": '"', "logprobs": one, "finish_reason": None} | ids | {"token_ids": [3]},
        {"text": "}", "logprobs": two, "token_ids": [94]} | end,
    ]
    choices = [[{"index": 0} | event] for event in events]
    wanted = [openai_object("text_completion", "cmpl", *each, usage=None) for each in choices]
    assert told == [*wanted, openai_object("text_completion", "cmpl") | counts, "[DONE]"]


def test_the_log_probabilities_of_a_prompt() -> None:
    tokens = [TokenLogprobs(67, -2.0, ((66, -0.5), (67, -2.0)), rank=2)]
    choice = AnswerChoice(0, [66, 67], SamplingParams(prompt_logprobs=2), prompt_logprobs=tokens)
    body = CompletionBody.model_validate({"prompt": "ab", "prompt_logprobs": 2})
    answer = CompletionAnswer("m", body, [choice], fake_tokenizer())
    assert answer.make_prompt_logprobs_field(choice)["prompt_logprobs"] == [
        None,
        {
            "66": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "67": {"logprob": -2.0, "rank": 2, "decoded_token": "b"},
        },
    ]


def test_a_message() -> None:
    tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    whole, told = ask("/v1/messages", {"messages": HELLO["messages"], "tools": tools} | GREEDY)
    call = {"type": "tool_use", "id": "call_#", "name": "weather", "input": {"city": "Ulm"}}
    blocks: list[Any] = [
        {"type": "thinking", "thinking": "so", "signature": ""},
        {"type": "text", "text": "I look."},
        call,
    ]
    tokens = {"cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    counts = {"input_tokens": PROMPT, "output_tokens": OUTPUT} | tokens
    end = {"stop_reason": "tool_use", "stop_sequence": None}
    head = {"id": "msg-#", "type": "message", "role": "assistant", "model": "fake"}
    last = {"usage": counts, "metrics": metrics(OUTPUT)}
    assert whole == head | {"content": blocks} | end | last
    start = head | {"content": [], "stop_reason": None, "stop_sequence": None}
    started = {"type": "message_start", "message": start | {"usage": counts | {"output_tokens": 1}}}
    empty: list[Any] = [
        blocks[0] | {"thinking": ""},
        blocks[1] | {"text": ""},
        call | {"input": {}},
    ]
    deltas: list[Any] = [
        {"type": "thinking_delta", "thinking": "so"},
        {"type": "text_delta", "text": "I look."},
        {"type": "input_json_delta", "partial_json": '{"city": "Ulm"}'},
    ]
    events = [
        event | {"index": index}
        for index in range(3)
        for event in (
            {"type": "content_block_start", "content_block": empty[index]},
            {"type": "content_block_delta", "delta": deltas[index]},
            {"type": "content_block_stop"},
        )
    ]
    ended = {"type": "message_delta", "delta": end} | last
    assert told == [started, *events, ended, {"type": "message_stop"}]


def test_a_response() -> None:
    tools = [{"type": "function"} | FUNCTION]
    whole, told = ask("/v1/responses", {"input": "hi", "tools": tools, "temperature": 0})
    parts: list[Any] = [
        {"type": "reasoning_text", "text": "so"},
        {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []},
    ]
    call = {"type": "function_call", "call_id": "call_#", "name": "weather"}
    items: list[Any] = [
        {"id": "rs_#", "type": "reasoning", "summary": [], "content": parts[:1]},
        {"id": "msg_#", "type": "message", "role": "assistant", "content": parts[1:]},
        {"id": "fc_#", "arguments": '{"city": "Ulm"}'} | call,
    ]
    items = [item | {"status": "completed"} for item in items]
    begun = {
        "id": "resp-#", "object": "response", "created_at": 0, "model": "fake",
        "status": "in_progress", "error": None, "incomplete_details": None, "output": [],
        "parallel_tool_calls": True, "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None}, "store": False,
        "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": tools,
        "truncation": "disabled", "usage": None, "metrics": None, "instructions": None,
        "max_output_tokens": None, "metadata": None, "temperature": 0, "top_p": None, "user": None,
    }  # fmt: skip
    counts = {
        "input_tokens": PROMPT,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": OUTPUT,
        "output_tokens_details": {"reasoning_tokens": THOUGHT},
        "total_tokens": PROMPT + OUTPUT,
    }
    ended = begun | {"status": "completed", "output": items, "usage": counts}
    ended |= {"metrics": metrics(OUTPUT)}
    assert whole == ended
    events: list[Any] = [("created", {"response": begun}), ("in_progress", {"response": begun})]
    for index, item in enumerate(items):
        place = {"item_id": item["id"], "output_index": index}
        empty = {"content": []} if "content" in item else {"arguments": ""}
        new = item | empty | {"status": "in_progress"}
        events.append(("output_item.added", {"output_index": index, "item": new}))
        if index == 2:
            given = {"arguments": item["arguments"]}
            events.append(("function_call_arguments.delta", place | {"delta": item["arguments"]}))
            events.append(("function_call_arguments.done", place | given | {"name": "weather"}))
        else:
            place["content_index"] = 0
            part, more = parts[index], {"logprobs": []} if index else {}
            kind, text = part["type"], part["text"]
            events += [
                ("content_part.added", place | {"part": part | {"text": ""}}),
                (f"{kind}.delta", place | {"delta": text} | more),
                (f"{kind}.done", place | {"text": text} | more),
                ("content_part.done", place | {"part": part}),
            ]
        events.append(("output_item.done", {"output_index": index, "item": item}))
    events.append(("completed", {"response": ended}))
    assert told == [{"type": f"response.{kind}"} | fields for kind, fields in events]


CARD = {
    "id": "fake", "object": "model", "created": 0, "owned_by": "mtpbuild", "root": "fake",
    "parent": None, "max_model_len": 5000, "status": {"value": "loaded"},
}  # fmt: skip
NO_EMBEDDINGS = "/v1/embeddings is not supported: these engines only generate text"
ERROR = {"message": NO_EMBEDDINGS, "type": "BadRequestError", "param": None, "code": 400}
TOKENS = {"count": 3, "max_model_len": 5000, "tokens": [0, 73, 74], "token_strs": None}


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        ("/v1/models", None, {"object": "list", "data": [CARD]}),
        ("/v1/models/fake", None, CARD),
        ("/load", None, {"server_load": 0}),
        ("/version", None, {"version": version("mtpbuild")}),
        ("/v1/embeddings", {}, {"error": ERROR}),
        ("/tokenize", {"prompt": "hi"}, TOKENS),
        ("/tokenize", {"prompt": "hi", "return_token_strs": True},
         TOKENS | {"token_strs": ["<s>", "h", "i"]}),
        ("/detokenize", {"tokens": [0, 73, 74]}, {"prompt": "<s>hi"}),
        ("/v1/messages/count_tokens", {"messages": HELLO["messages"]}, {"input_tokens": 20}),
        ("/v1/messages", {"messages": []},
         {"type": "error",
          "error": {"type": "invalid_request_error", "message": "max_tokens: Field required"}}),
        ("/markdown", {"text": "*a*"}, {"html": "<p><em>a</em></p>\n"}),
    ],
)  # fmt: skip
def test_the_other_routes(path: str, body: Any, wanted: Any, client: httpx2.Client) -> None:
    response = client.get(path) if body is None else client.post(path, json=body)
    assert plain(response.json()) == wanted
