"""What each route answers, whole: each field is compared with a literal, so that none is untested.

Times are 0, and ids end in `#`.
"""

import re
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any

import httpx2
import pytest

from mtpbuild.runtime import SamplingParams
from mtpbuild.runtime.requests.request import TokenLogprobs
from mtpbuild.runtime.requests.stats import AcceptanceCounter, RequestMetrics
from mtpbuild.runtime.server.answers import AnswerChoice
from mtpbuild.runtime.server.completions import CompletionAnswer
from mtpbuild.runtime.server.protocol import CompletionBody
from tests.support.fakes import fake_tokenizer
from tests.support.served import HELLO, TOOL_TEMPLATE, TOOLS, events, saying, served

SAID = (
    '<think>so</think>I look.<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}'
    "</tool_call></s>"
)
GREEDY = {"temperature": 0, "max_tokens": 100}
PROMPT, OUTPUT, THOUGHT = 19, 82, 4  # tokens
ARGUMENTS = '{"city": "Ul', 'm"}'  # as the steps have them


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
        with served(nextn=15, **answer) as (server, _), server.client() as client:
            response = client.post(path, json=body | more)
            assert response.status_code == 200, response.text
            names = re.findall(r"^event: (.*)$", response.text, re.MULTILINE)
            bodies.append(plain(events(response) if more else response.json()))
    assert names == [event["type"] for event in bodies[1] if "type" in event]
    return bodies[0], bodies[1]


def metrics(full_steps: int) -> Any:
    """Return vLLM's metrics of an answer: a step without drafts, then steps of 15 drafts."""
    steps, drafts = 1 + full_steps, 15 * full_steps
    counts = {"num_accepted_draft_tokens": drafts, "num_draft_tokens": drafts}
    return {
        "time_to_first_token_ms": 0,
        "generation_time_ms": 0,
        "queue_time_ms": 0,
        "mean_itl_ms": 0 if full_steps else None,
        "tokens_per_second": 0,
        "forced_tokens": 0,
        "speculative_decoding": counts
        | {
            "mean_acceptance_length": OUTPUT / 7 if full_steps else 1.0,
            "draft_acceptance_rate": 1.0 if full_steps else None,
            "per_position_acceptance_rates": [full_steps / steps] * 15,
            "acceptance_histogram": [1, *[0] * 14, full_steps],
            "num_spec_steps": steps,
            "num_spec_tokens": 15,
        },
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
    return {"usage": tokens, "metrics": metrics(output // 13)}


def openai_object(kind: str, name: str, *choices: Any, **more: Any) -> Any:
    head = {"id": f"{name}-#", "object": kind, "created": 0, "model": "fake"}
    return head | {"choices": [*choices]} | more


def test_a_chat() -> None:
    whole, told = ask("/v1/chat/completions", HELLO | GREEDY | {"tools": TOOLS})
    function = {"name": "weather", "arguments": "".join(ARGUMENTS)}
    call = {"id": "call_#", "type": "function", "function": function}
    counts = usage(PROMPT, OUTPUT, THOUGHT)
    thought = {"reasoning_content": "so", "reasoning": "so", "content": "I look."}
    message = {"role": "assistant", "refusal": None, "tool_calls": [call]} | thought
    end = {"finish_reason": "tool_calls", "stop_reason": None}
    choice = {"index": 0, "message": message, "logprobs": None} | end
    assert whole == openai_object("chat.completion", "chatcmpl", choice) | counts
    begun = {"index": 0} | call | {"function": function | {"arguments": ARGUMENTS[0]}}
    deltas: list[Any] = [
        {"role": "assistant", "content": ""},
        thought,
        {"tool_calls": [begun]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ARGUMENTS[1]}}]},
        {},
    ]
    head = {"index": 0, "logprobs": None, "finish_reason": None}
    choices = [head | {"delta": delta} for delta in deltas]
    choices[-1] |= end
    kind = ("chat.completion.chunk", "chatcmpl")
    wanted = [openai_object(*kind, each, usage=None) for each in choices]
    assert told == [*wanted, openai_object(*kind) | counts, "[DONE]"]


def test_a_chats_tokens() -> None:
    body = HELLO | {"max_tokens": 1, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    whole, (first, event, *_) = ask("/v1/chat/completions", body, "ok")
    entry = {"token": "o", "logprob": 0.0, "bytes": [111]}
    end = {"finish_reason": "length", "stop_reason": None, "token_ids": [80]}
    choice = {"index": 0, "logprobs": {"content": [entry | {"top_logprobs": [entry]}]}} | end
    message = {"role": "assistant", "content": "o", "refusal": None}
    ids = [0, 86, 84, 261, 27, 222, 73, 74, 66, 84, 84, 74, 84, 85, 66, 79, 85, 27, 222]
    wanted = openai_object("chat.completion", "chatcmpl", choice | {"message": message})
    assert whole == wanted | usage(PROMPT, 1, 0) | {"prompt_token_ids": ids}
    assert first["prompt_token_ids"] == ids
    spans = {"spans": [["o", False, "content"]], "delta": {"content": "o"}}
    assert event == openai_object("chat.completion.chunk", "chatcmpl", choice | spans, usage=None)


def test_a_completion() -> None:
    body = {"prompt": "ab", "temperature": 0, "logprobs": 1, "return_token_ids": True}
    whole, told = ask("/v1/completions", body | {"max_tokens": 1})
    logprobs = {"tokens": ['"'], "token_logprobs": [0.0], "top_logprobs": [{'"': 0.0}]}
    choice = {"index": 0, "text": '"', "logprobs": logprobs | {"text_offset": [0]}}
    choice |= {"finish_reason": "length", "stop_reason": None}
    choice |= {"token_ids": [3], "prompt_token_ids": [0, 66, 67]}
    counts, kind = usage(3, 1, 0), ("text_completion", "cmpl")
    assert whole == openai_object(*kind, choice) | counts
    wanted = openai_object(*kind, choice, usage=None)
    assert told == [wanted, openai_object(*kind) | counts, "[DONE]"]


def test_the_log_probabilities_of_a_prompt() -> None:
    tokens = [TokenLogprobs(67, -2.0, ((66, -0.5), (67, -2.0)), rank=2)]
    choice = AnswerChoice(0, [66, 67], SamplingParams(prompt_logprobs=2), prompt_logprobs=tokens)
    answer = CompletionAnswer("m", CompletionBody(prompt="ab"), [choice], fake_tokenizer())
    one = {"logprob": -0.5, "rank": 1, "decoded_token": "a"}
    two = {"logprob": -2.0, "rank": 2, "decoded_token": "b"}
    fields = answer.make_prompt_logprobs_field(choice)
    assert fields == {"prompt_logprobs": [None, {"66": one, "67": two}]}


def test_the_times_of_an_answer() -> None:
    drafts = replace(AcceptanceCounter(1).report(), num_spec_steps=3)
    measured = RequestMetrics(2, 5, 0.25, 0.5, 10.0, drafts, queue_s=0.125, forced_tokens=3)
    choice = AnswerChoice(0, [66], SamplingParams(), metrics=measured)
    answer = CompletionAnswer("m", CompletionBody(prompt="a"), [choice])
    assert answer.metrics() == {
        "time_to_first_token_ms": 250.0,
        "generation_time_ms": 2000.0,
        "queue_time_ms": 125.0,
        "mean_itl_ms": 1000.0,
        "tokens_per_second": 10.0,
        "forced_tokens": 3,
        "speculative_decoding": asdict(drafts),
    }


def test_a_message() -> None:
    tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    whole, told = ask("/v1/messages", {"messages": HELLO["messages"], "tools": tools} | GREEDY)
    call = {"type": "tool_use", "id": "call_#", "name": "weather"}
    blocks: list[Any] = [
        {"type": "thinking", "thinking": "so", "signature": ""},
        {"type": "text", "text": "I look."},
        call | {"input": {"city": "Ulm"}},
    ]
    counts = {"input_tokens": PROMPT, "output_tokens": OUTPUT}
    counts |= {"cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    end = {"stop_reason": "tool_use", "stop_sequence": None}
    head = {"id": "msg-#", "type": "message", "role": "assistant", "model": "fake"}
    last = {"usage": counts, "metrics": metrics(6)}
    assert whole == head | {"content": blocks} | end | last
    start: Any = head | {"content": [], "stop_reason": None, "stop_sequence": None}
    empty: list[Any] = [
        blocks[0] | {"thinking": ""},
        blocks[1] | {"text": ""},
        call | {"input": {}},
    ]
    deltas: list[list[Any]] = [
        [{"type": "thinking_delta", "thinking": "so"}],
        [{"type": "text_delta", "text": "I look."}],
        [{"type": "input_json_delta", "partial_json": text} for text in ARGUMENTS],
    ]
    steps = [
        event | {"index": index}
        for index in range(3)
        for event in (
            {"type": "content_block_start", "content_block": empty[index]},
            *({"type": "content_block_delta", "delta": delta} for delta in deltas[index]),
            {"type": "content_block_stop"},
        )
    ]
    assert told == [
        {"type": "message_start", "message": start | {"usage": counts | {"output_tokens": 1}}},
        *steps,
        {"type": "message_delta", "delta": end} | last,
        {"type": "message_stop"},
    ]


def test_a_response() -> None:
    tools = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
    whole, told = ask("/v1/responses", {"input": "hi", "tools": tools, "temperature": 0})
    thought = {"type": "reasoning_text", "text": "so"}
    text = {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
    arguments = {"arguments": "".join(ARGUMENTS)}
    call = {"type": "function_call", "call_id": "call_#", "name": "weather"}
    items: list[Any] = [
        {"id": "rs_#", "type": "reasoning", "summary": [], "content": [thought]},
        {"id": "msg_#", "type": "message", "role": "assistant", "content": [text]},
        {"id": "fc_#"} | arguments | call,
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
    counts = {"input_tokens": PROMPT, "output_tokens": OUTPUT, "total_tokens": PROMPT + OUTPUT}
    counts |= {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}  # type: ignore[dict-item]
    counts |= {"output_tokens_details": {"reasoning_tokens": THOUGHT}}  # type: ignore[dict-item]
    ended = begun | {"status": "completed", "output": items, "usage": counts}
    ended |= {"metrics": metrics(6)}
    assert whole == ended
    wanted: list[Any] = [("created", {"response": begun}), ("in_progress", {"response": begun})]
    for index, item in enumerate(items):
        place = {"item_id": item["id"], "output_index": index}
        empty: Any = {"content": []} if index < 2 else {"arguments": ""}
        new = item | empty | {"status": "in_progress"}
        wanted.append(("output_item.added", {"output_index": index, "item": new}))
        if index == 2:
            kind = "function_call_arguments"
            wanted += [(f"{kind}.delta", place | {"delta": part}) for part in ARGUMENTS]
            wanted.append((f"{kind}.done", place | arguments | {"name": "weather"}))
        else:
            (part,), more = item["content"], dict[str, Any](logprobs=[]) if index else {}
            kind, place["content_index"] = part["type"], 0
            wanted += [
                ("content_part.added", place | {"part": part | {"text": ""}}),
                (f"{kind}.delta", place | {"delta": part["text"]} | more),
                (f"{kind}.done", place | {"text": part["text"]} | more),
                ("content_part.done", place | {"part": part}),
            ]
        wanted.append(("output_item.done", {"output_index": index, "item": item}))
    wanted.append(("completed", {"response": ended}))
    assert told == [
        {"type": f"response.{kind}", "sequence_number": number} | fields
        for number, (kind, fields) in enumerate(wanted)
    ]


CARD = {
    "id": "fake", "object": "model", "created": 0, "owned_by": "mtpbuild", "root": "fake",
    "parent": None, "max_model_len": 5000, "status": {"value": "loaded"},
}  # fmt: skip
NO_EMBEDDINGS = "/v1/embeddings is not supported: these engines only generate text"
ERROR = {"message": NO_EMBEDDINGS, "type": "BadRequestError", "param": None, "code": 400}
REQUIRED = {"type": "invalid_request_error", "message": "max_tokens: Field required"}
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
        ("/v1/messages", {"messages": []}, {"type": "error", "error": REQUIRED}),
        ("/markdown", {"text": "*a*"}, {"html": "<p><em>a</em></p>\n"}),
    ],
)  # fmt: skip
def test_the_other_routes(path: str, body: Any, wanted: Any, client: httpx2.Client) -> None:
    response = client.get(path) if body is None else client.post(path, json=body)
    assert plain(response.json()) == wanted
