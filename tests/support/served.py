"""A server over fake programs, and what tests ask it: requests, events and errors."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import tokenizers

from mtpbuild.runtime.server.options import ServerOptions
from mtpbuild.runtime.text.chat_template import ChatTemplates, TemplateText
from mtpbuild.runtime.text.tokenizer import Tokenizer
from tests.support.fakes import (
    TEMPLATE,
    FakePrograms,
    NextToken,
    backend_tokenizer,
    fake_engine,
    mixed,
    scripted,
)
from tests.support.live_server import Live, live

CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
TOOL_TEMPLATE = TEMPLATE.replace("{{ m.content }}", "{{ m.content }}" + CALLS)
# A thought, a text and a call, as models say them, and what ends them.
SAID = (
    '<think>so</think>I look.<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}'
    "</tool_call>｜end｜"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ASK = {"prompt": "hello", "max_tokens": 5, "temperature": 0}
LONG = {"prompt": "hello", "max_tokens": 4000, "temperature": 0, "ignore_eos": True}
HELLO = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 8}


@contextlib.contextmanager
def served(
    next_token: NextToken = mixed, settings: ServerOptions | None = None, **flags: Any
) -> Iterator[tuple[Live, FakePrograms]]:
    sizes = {"max_batch": 2, "max_seq_len": 5000, "prefill_chunk": 64}
    engine, programs = fake_engine(next_token=next_token, limit=1 << 20, **sizes | flags)
    with engine, live(engine, settings) as server:
        yield server, programs


def chat(client: httpx2.Client, body: dict[str, Any]) -> Any:
    """Return the only choice of a chat's answer."""
    (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
    return choice


def metrics(client: httpx2.Client) -> dict[str, str]:
    """Return what /metrics says, by names without `vllm:` and the labels of all."""
    lines = client.get("/metrics").text.splitlines()
    found = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    usual = '{engine="0",model_name="fake"}'
    return {name.removeprefix("vllm:").removesuffix(usual): value for name, value in found}


def events(response: httpx2.Response) -> list[Any]:
    """Return what a stream said, [DONE] as a text."""
    data = (line for line in response.text.splitlines() if line.startswith("data: "))
    lines = [line.removeprefix("data: ") for line in data]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def fails(response: httpx2.Response, status: int, says: str, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert says in error["message"], error
    long = "maximum context length" in error["message"]
    code: int | str = "context_length_exceeded" if long else status
    assert (error["code"], error["param"]) == (code, param)
    assert error["type"].endswith("Error")


def saying(
    text: str, template: str = TEMPLATE, backend: tokenizers.Tokenizer | None = None
) -> dict[str, Any]:
    """Return an engine whose answer to HELLO is this text, over and over."""
    tokenizer = Tokenizer(
        backend or backend_tokenizer(),
        chat_template=ChatTemplates({"default": TemplateText("x", template)}, {"bos_token": "<s>"}),
        bos_token="<s>",
    )
    prompt = tokenizer.encode(
        tokenizer.chat_prompt(HELLO["messages"], tools=None),  # type: ignore[arg-type]
        add_special_tokens=False,
    )
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return {"next_token": scripted(len(prompt), tokens), "tokenizer": tokenizer}
