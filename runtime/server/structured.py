"""What form a body asks for: OpenAI's response_format, vLLM's structured_outputs, forced calls."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from mtpbuild.runtime.errors import RequestError
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.protocol import ChatBody, CompletionBody, Tool
from mtpbuild.runtime.server.tools import Form
from mtpbuild.runtime.structured import StructuredOutputs
from mtpbuild.runtime.tokenizer import Tokenizer

KINDS = ("json", "regex", "choice", "grammar", "json_object")
NO_WHITE_SPACE = {"x-guidance": {"whitespace_flexible": False}}
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def read_structured(body: ChatBody | CompletionBody) -> tuple[str, StructuredOutputs] | None:
    """The form and the field that asks for it, None if none does; raises ApiError."""
    asked = {
        "response_format": _response_format(body.response_format or {}),
        "structured_outputs": body.structured_outputs or {},
    }
    given = {name: form for name, form in asked.items() if form}
    if len(given) > 1:
        raise ApiError(400, "response_format can't go with structured_outputs", "response_format")
    for field, form in given.items():
        if unknown := sorted(form.keys() - {*KINDS, "disable_any_whitespace"}):
            message = f"{field}: {unknown[0]} is not supported; known: {', '.join(KINDS)}"
            raise ApiError(400, message, field)
        try:
            return field, StructuredOutputs(**{k: form[k] for k in KINDS if k in form})
        except RequestError as error:
            raise ApiError(400, str(error), field) from None
    return None


def _response_format(given: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's words in vLLM's."""
    kind, field = given.get("type"), "response_format"
    if not given or kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        message = f"{field}.type must be text, json_object or json_schema, not {kind!r:.60}"
        raise ApiError(400, message, field)
    named = given.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict | bool):
        raise ApiError(400, f"{field}.json_schema.schema must be a JSON schema", field)
    return {"json": schema}


def forced_calls(
    body: ChatBody, form: Form | None, tokenizer: Tokenizer | None
) -> StructuredOutputs | None:
    """The form of an answer that must be calls, by tool_choice; None if it need not.

    Raises ApiError. A function that is named is called once, of "required" any number of tools,
    unless parallel_tool_calls is false.
    """
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return None
    name = None
    if isinstance(choice, dict):
        function = choice.get("function") if choice.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and not isinstance(name, str):
        known = '"auto", "none", "required" or a function by its name'
        raise ApiError(400, f"tool_choice must be {known}", "tool_choice")
    tools = [tool for tool in body.tools or () if name in (None, tool.function.name)]
    if not tools:
        what = "tool_choice needs tools" if name is None else f"tool_choice: no tool {name!r:.60}"
        raise ApiError(400, what, "tool_choice")
    if form is None or tokenizer is None:
        message = "tool_choice: no form of calls is known (--tool-call-parser)"
        raise ApiError(400, message, "tool_choice")
    once = name is not None or body.parallel_tool_calls is False
    return StructuredOutputs(grammar=calls_grammar(form, tools, tokenizer, once=once))


def calls_grammar(form: Form, tools: Sequence[Tool], tokenizer: Tokenizer, *, once: bool) -> str:
    """Lark's words for calls of these tools, one or, unless `once`, more of them."""
    before, between, after = form.spelled
    rules = []
    for number, tool in enumerate(tools):
        given = tool.function.parameters
        schema = NO_PARAMETERS if given is None else given
        name = tool.function.name
        if form.head is None:  # the call is JSON
            name = json.dumps(name, ensure_ascii=False)[1:-1]
        opening = _literal(form.begin + before + name + between, tokenizer)
        closing = _literal(after + form.end, tokenizer)
        arguments = json.dumps(schema | NO_WHITE_SPACE)
        rules.append(f"call_{number}: {opening} %json {arguments} {closing}")
    first, last = (_literal(mark, tokenizer) for mark in form.outer or ("", ""))
    call = " | ".join(f"call_{number}" for number in range(len(tools)))
    return "\n".join([f"start: {first} call{'' if once else '+'} {last}", f"call: {call}", *rules])


def _literal(text: str, tokenizer: Tokenizer) -> str:
    """A text as Lark writes it, with added tokens by their ids: they are no text to llguidance."""
    return " ".join(_parts(text, tokenizer.added_tokens))


def _parts(text: str, added: dict[str, int]) -> Iterator[str]:
    while text:
        found = [(text.index(token), token) for token in added if token in text]
        at, token = min(found, default=(len(text), ""))
        if at:
            yield json.dumps(text[:at])
        if token:
            yield f"<[{added[token]}]>"
        text = text[at + len(token) :]
