"""Bodies of up to 8 MiB that cost a server much if it takes them as they come."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

MOST = 8 * 1024 * 1024 - 1024
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def fill(begin: str, item: str, end: str, most: int = MOST) -> bytes:
    """Repeat an item between two texts, up to so many bytes."""
    return (begin + item * ((most - len(begin) - len(end)) // len(item.encode())) + end).encode()


Body = Callable[[], bytes]  # some take a second to make
filled: Callable[..., Body] = partial(partial, fill)


def schema(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {} for i in range(count)}}


def dump(**body: Any) -> Body:
    return lambda: json.dumps(body).encode()


def form(**asked: Any) -> Body:
    return dump(prompt="a", max_tokens=1, structured_outputs=asked)


# Names that name the next one: as deep as no thread's usual stack is.
CHAIN: dict[str, Any] = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(3000)} | {
    "d3000": {}
}
HI = '"messages": [{"role": "user", "content": "hi"}]'
QUICK: dict[str, tuple[str, Body]] = {
    "prompts times n": (COMPLETIONS, filled('{"n": 128, "prompt": [', "[1],", "[1]]}", 400_000)),
    "wrong items": (COMPLETIONS, filled('{"prompt": [', "{},", "{}]}", 250_000)),
    "a long prompt": (COMPLETIONS, filled('{"prompt": "', "some words ", '"}')),
    "lists of one": (COMPLETIONS, filled('{"prompt": [', "[[0]],", "[]]}")),
    "a large schema": (COMPLETIONS, form(json=schema(10_000))),
    "not a number": ("/v1/responses", lambda: b'{"input": "hi", "metadata": {"a": NaN}}'),
}
BODIES = QUICK | {
    "nested lists": (COMPLETIONS, lambda: b"[" * MOST),
    "nested objects": ("/v1/responses", filled('{"metadata": ', '{"a":', "}")),
    "a wide prompt": (COMPLETIONS, filled('{"prompt": "\U0001f600', "a", '"}')),
    "one word": (COMPLETIONS, filled('{"prompt": "', "a", '"}')),
    "escapes": (COMPLETIONS, filled('{"prompt": "', r"\u00e9", '"}')),
    "texts": (COMPLETIONS, filled('{"prompt": [', '"ab",', '"ab"]}')),
    "token ids": (COMPLETIONS, filled('{"prompt": [', "300,", "300]}")),
    "as many ids as may be": (COMPLETIONS, filled('{"prompt": [', "300,", "3]}", 1_900_000)),
    "messages": (CHAT, filled('{"messages": [', '{"role":"user","content":""},', "{}]}")),
    "messages that may be": (
        CHAT,
        filled('{"messages": [', '{"role":"user","content":""},', "{}]}", 2_800_000),
    ),
    "a long message": (CHAT, filled('{"messages": [{"role": "user", "content": "', "a ", '"}]}')),
    "tools": (CHAT, filled("{" + HI + ', "tools": [', '{"function":{"name":"a"}},', "{}]}")),
    "wrong tools": (CHAT, filled("{" + HI + ', "tools": [', "7,", "7]}", 900_000)),
    "stop": (COMPLETIONS, filled('{"prompt": "a", "stop": [', '"ab",', '"ab"]}', 2_000_000)),
    "a long stop": (COMPLETIONS, filled('{"prompt": "a", "stop": "', "a", '"}')),
    "bad words": (COMPLETIONS, filled('{"prompt": "a", "bad_words": ["', "a ", '"]}')),
    "biases": (COMPLETIONS, dump(prompt="a", logit_bias=dict.fromkeys(range(400_000), 1))),
    "digits": (COMPLETIONS, lambda: b'{"prompt": [' + b"7" * 1_000_000 + b"]}"),
    "keys": (COMPLETIONS, filled("{", '"prompt":1,', '"prompt":2}', 5_000_000)),
    "template's own": (
        CHAT,
        filled("{" + HI + ', "chat_template_kwargs": {"a": [', "1,", "1]}}", 900_000),
    ),
    "a text of tokens": ("/tokenize", filled('{"prompt": "', "some words ", '"}')),
    "tokens of a text": ("/detokenize", filled('{"tokens": [', "9,", "9]}", 900_000)),
    "parts": (
        "/v1/messages",
        filled(
            '{"max_tokens": 1, "messages": [{"role": "user", "content": [', '{"type":1},', "{}]}]}"
        ),
    ),
    "items": ("/v1/responses", filled('{"input": [', '{"role":"user"},', "{}]}", 1_500_000)),
    "counted": (
        "/v1/messages/count_tokens",
        filled('{"messages": [{"role": "user", "content": "', "a ", '"}]}'),
    ),
    "images": (
        CHAT,
        filled('{"messages": [{"role": "user", "content": [{"image_url": "', "a", '"}]}]}'),
    ),
    "embeddings": ("/v1/embeddings", filled('{"input": "', "a", '"}')),
    "definitions": (COMPLETIONS, form(json={"$defs": CHAIN, "$ref": "#/$defs/d0"})),
    "a pattern": (COMPLETIONS, form(regex="(a?)" * 50_000)),
    "a pattern of powers": (COMPLETIONS, form(regex="((a{100}){100}){100}")),
    "brackets": (COMPLETIONS, form(grammar="root ::= " + "(" * 20_000 + ")" * 20_000)),
    "rules": (
        COMPLETIONS,
        form(grammar="start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(8000))),
    ),
}
