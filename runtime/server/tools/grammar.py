"""Lark grammars for answers that must be tool calls, as JSON or with their arguments in tags."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from mtpbuild.runtime.constraints.json_rules import json_rules
from mtpbuild.runtime.constraints.json_schema import object_schema, prepare_schema
from mtpbuild.runtime.sampling.structured_outputs import StructuredOutputs
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.protocol import ChatBody, Tool
from mtpbuild.runtime.server.tools.forms import INDEX_OF_CALL, Form, Tags
from mtpbuild.runtime.server.tools.values import allowed_types, as_text
from mtpbuild.runtime.text.tokenizer import Tokenizer

INDEX = " /[0-9]{1,3}/ "
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
PLAIN_KEYS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
NOTES = {"description", "title", "default", "examples", "$schema", "$id", "$comment", "strict"}


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
    """Write a text in Lark's syntax, with added tokens as ids, as llguidance needs them."""
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


def tagged_rules(
    rule: str, form: Form, name: str, schema: Mapping[str, Any], literal: Callable[[str], str]
) -> list[str]:
    """Write the rules for a call of one function, with its arguments in the schema's order.

    literal: writes a text in Lark's syntax. Raises ValueError for a schema that the grammar can't
    express in tags.
    """
    tags = form.tags
    assert tags is not None
    if others := sorted(schema.keys() - PLAIN_KEYS - NOTES):
        raise ValueError(f"{others[0]} of a function's parameters")
    properties = schema.get("properties")
    parts = dict(properties) if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    needed = [key for key in required if isinstance(key, str)] if isinstance(required, list) else []
    parts |= {key: {} for key in needed if key not in parts}
    rules, members = [], []
    for number, (key, part) in enumerate(parts.items()):
        member = f"{rule}_{number}"
        members.append(member if key in needed else f"{member}?")
        rules += _member_rules(member, tags, key, part, schema, literal)
    opening = literal(form.begin + tags.name[0] + name + tags.name[1])
    closing = literal(tags.end + form.end)
    return [f"{rule}: {opening} {' '.join(members)} {closing}", *rules]


def _member_rules(
    rule: str, tags: Tags, key: str, part: Any, root: Mapping[str, Any], literal: Callable[..., str]
) -> list[str]:
    """Write the rules for one argument with its tags."""

    def tagged(value: str, *, string: bool) -> str:
        before, after = tags.value if string or tags.other is None else tags.other
        return f"{literal(tags.key + key + before)} {value} {literal(after)}"

    part = part if isinstance(part, Mapping) else {}
    values = [part["const"]] if "const" in part else part.get("enum")
    if isinstance(values, list) and values:
        each = [tagged(literal(as_text(v)), string=isinstance(v, str)) for v in values]
        return [f"{rule}: {' | '.join(each)}"]
    if "string" in allowed_types(part, root, {}):
        return _text_rules(rule, tags, key, part, literal)
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    schema = prepare_schema(json.dumps({**shared, **part}))
    return [f"{rule}: {tagged(f'{rule}_value', string=False)}", json_rules(schema, f"{rule}_value")]


def _text_rules(
    rule: str, tags: Tags, key: str, part: Mapping[str, Any], literal: Callable[[str], str]
) -> list[str]:
    """Write the rules for a string argument, which ends where its closing tag begins."""
    if "pattern" in part:
        raise ValueError(f"a pattern of {key!r:.60}")
    least, most = part.get("minLength", 0), part.get("maxLength", "")
    length = f"{{{least},{most}}}" if least or most != "" else "*"
    opening, close = literal(tags.key + key + tags.value[0]), tags.value[1]
    line = close.endswith("\n")
    end = literal(close.removesuffix("\n"))
    text, after = f"{rule}_text", literal("\n") if line else ""
    if end.startswith("<["):  # a special token, which can't occur in the text
        return [f"{rule}: {opening} {text} {end} {after}", f"{text}: /(?s:.){length}/"]
    if "<[" in end:
        raise ValueError("a closing tag that is a token in part")
    return [f"{rule}: {opening} {text} {after}", f"{text}[suffix={end}]: /(?s:.){length}/"]
