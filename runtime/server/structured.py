"""Structured output of a request: response_format, structured_outputs, or forced tool calls."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from mtpbuild.runtime.constraints.json_rules import json_rules
from mtpbuild.runtime.constraints.json_schema import object_schema, prepare_schema
from mtpbuild.runtime.errors import RequestError
from mtpbuild.runtime.sampling.structured_outputs import StructuredOutputs
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.protocol import ChatBody, GenerationBody, Tool
from mtpbuild.runtime.server.tools import Form
from mtpbuild.runtime.server.tools.forms import INDEX_OF_CALL
from mtpbuild.runtime.server.tools.tagged_grammar import tagged_rules
from mtpbuild.runtime.text.tokenizer import Tokenizer

KINDS = ("json", "regex", "choice", "grammar", "json_object")
INDEX = " /[0-9]{1,3}/ "
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def read_structured(body: GenerationBody) -> tuple[str, StructuredOutputs] | None:
    """Return the field that asks for structured output, and its value; None if there is none.

    Raises ApiError.
    """
    given = {"structured_outputs": body.structured_outputs}
    if body.response_format is not None:
        given["response_format"] = _response_format(body.response_format)
    forms = {name: form for name, form in given.items() if form is not None}
    if len(forms) > 1:
        raise ApiError(400, "response_format can't go with structured_outputs", "response_format")
    for field, form in forms.items():
        if unknown := sorted(form.keys() - {*KINDS, "disable_any_whitespace"}):
            message = f"{field}: {unknown[0]} is not supported; known: {', '.join(KINDS)}"
            raise ApiError(400, message, field)
        try:
            return field, StructuredOutputs(**{k: form[k] for k in KINDS if k in form})
        except RequestError as error:
            raise ApiError(400, str(error), field) from None
    return None


def form_field(body: GenerationBody) -> str:
    """Return the name of the field that asks for structured output."""
    given = (name for name in ("response_format", "structured_outputs") if getattr(body, name))
    return next(given, "tool_choice")


def _response_format(given: dict[str, Any]) -> dict[str, Any] | None:
    """Translate OpenAI's response_format into vLLM's structured_outputs."""
    kind, field = given.get("type"), "response_format"
    if kind in ("text", "json_object"):
        for name in ("schema", "json_schema"):
            if given.get(name) is not None:
                message = f"{field}.{name} is not supported: type json_schema has it"
                raise ApiError(400, message, field)
        return {"json_object": True} if kind == "json_object" else None
    if kind != "json_schema":
        message = f"{field}.type must be text, json_object or json_schema, not {kind!r:.60}"
        raise ApiError(400, message, field)
    match given.get("json_schema"):
        case {"schema": dict() | bool() as schema}:
            return {"json": schema}
    raise ApiError(400, f"{field}.json_schema.schema must be a JSON schema", field)


def forced_calls(
    body: ChatBody, form: Form | None, tokenizer: Tokenizer | None
) -> StructuredOutputs | None:
    """Return the grammar of an answer that must be tool calls; None if tool_choice forces none.

    A named function is called once; "required" allows any number of calls unless
    parallel_tool_calls is false. Raises ApiError.
    """
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return None
    match choice:
        case "required":
            name = None
        case {"type": "function", "function": {"name": str(name)}}:
            pass
        case _:
            known = '"auto", "none", "required" or a function by its name'
            raise ApiError(400, f"tool_choice must be {known}", "tool_choice")
    tools = [tool for tool in body.tools or () if name in (None, tool.function.name)]
    if not tools:
        what = "tool_choice needs tools" if name is None else f"tool_choice: no tool {name!r:.60}"
        raise ApiError(400, what, "tool_choice")
    if form is None or tokenizer is None:
        message = "tool_choice: no form of calls is known (--tool-call-parser)"
        raise ApiError(400, message, "tool_choice")
    single = name is not None or body.parallel_tool_calls is False
    try:
        return StructuredOutputs(grammar=write_calls_grammar(form, tools, tokenizer, single=single))
    except ValueError as error:
        message = f"tool_choice: with arguments in tags a call can't be held to {error}"
        raise ApiError(400, f'{message}: say "auto"', "tool_choice") from None


def write_calls_grammar(
    form: Form, tools: Sequence[Tool], tokenizer: Tokenizer, *, single: bool
) -> str:
    """Write a Lark grammar for calls of these tools: exactly one if `single`, else one or more.

    Raises ValueError for a schema that the grammar can't express.
    """
    before, between, after = form.spelled
    spell = partial(_literal, tokenizer=tokenizer)
    opening, closing = spell(form.begin + before), spell(after + form.end)
    inner = INDEX.join(map(spell, between.split(INDEX_OF_CALL)))
    rules = []
    for number, tool in enumerate(tools):
        name = tool.function.name
        if form.tags is not None:
            schema = NO_PARAMETERS if tool.function.parameters is None else tool.function.parameters
            rules += tagged_rules(f"call_{number}", form, name, schema, spell)
            continue
        if form.head is None:  # the call is JSON
            name = json.dumps(name, ensure_ascii=False)[1:-1]
        parts = opening, json.dumps(name), inner, f"arguments_{number}", closing
        rules.append(f"call_{number}: {' '.join(parts)}")
        rules.append(_arguments(tool, f"arguments_{number}"))
    first, last = (_literal(mark, tokenizer) for mark in form.outer or ("", ""))
    call = " | ".join(f"call_{number}" for number in range(len(tools)))
    start = f"start: {first} call{'' if single else '+'} {last}"
    return "\n".join([start, f"call: {call}", *rules])


def _arguments(tool: Tool, rule: str) -> str:
    """Write the rules for a tool's arguments, a JSON object; raises ApiError."""
    schema = tool.function.parameters
    try:
        arguments = NO_PARAMETERS if schema is None else object_schema(schema)
        return json_rules(prepare_schema(json.dumps(arguments)), rule)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ApiError(400, f"tools: {tool.function.name:.60}: {error}", "tools") from None


def _literal(text: str, tokenizer: Tokenizer) -> str:
    """Write a text in Lark's syntax; llguidance needs added tokens as ids."""
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
