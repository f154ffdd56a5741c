"""Lark grammars for answers that must be tool calls, in all forms."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from mtpbuild.runtime.constraints.json_schema import make_object_schema, prepare_schema
from mtpbuild.runtime.errors import RequestError
from mtpbuild.runtime.text.tokenizer import Tokenizer
from mtpbuild.runtime.tool_calls.forms import INDEX_OF_CALL, Form, Tags
from mtpbuild.runtime.tool_calls.quoted_grammar import QuotedRules, drop_formats
from mtpbuild.runtime.tool_calls.values import as_text, list_allowed_types

INDEX = " /[0-9]{1,3}/ "
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
PLAIN_KEYS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
NOTES = {"description", "title", "default", "examples", "$schema", "$id", "$comment", "strict"}


def write_calls_grammar(
    form: Form, tools: Mapping[str, Any], tokenizer: Tokenizer, *, single: bool
) -> str:
    """Write a Lark grammar for calls of these tools: exactly one if `single`, else one or more.

    tools: function -> JSON schema of its arguments, or None. Raises ValueError for a schema that
    the grammar can't express in this form, RequestError for one that is wrong.
    """
    before, between, after = form.spelled
    spell = partial(_quote_literal, tokenizer=tokenizer)
    opening, closing = spell(form.begin + before), spell(after + form.end)
    inner = INDEX.join(map(spell, between.split(INDEX_OF_CALL)))
    rules = []
    for number, (name, parameters) in enumerate(tools.items()):
        schema = NO_PARAMETERS if parameters is None else parameters
        if form.tags is not None:
            rules += write_tagged_rules(f"call_{number}", form, name, schema, spell)
            continue
        parts = opening, json.dumps(name), inner, f"arguments_{number}", closing
        rules.append(f"call_{number}: {' '.join(parts)}")
        try:
            schema = make_object_schema(schema)
            schema = prepare_schema(json.dumps(drop_formats(schema) if form.quote else schema))
        except (ValueError, OverflowError, RecursionError) as error:
            raise RequestError(f"tools: {name:.60}: {error}", "tools") from None
        if form.quote:
            rules += QuotedRules(f"arguments_{number}", schema, form.quote, spell(form.quote)).lines
        else:
            rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
    first, last = (_quote_literal(mark, tokenizer) for mark in form.outer or ("", ""))
    call = " | ".join(f"call_{number}" for number in range(len(tools)))
    start = f"start: {first} call{'' if single else '+'} {last}"
    return "\n".join([start, f"call: {call}", *rules])


def _quote_literal(text: str, tokenizer: Tokenizer) -> str:
    """Write a text in Lark's syntax, with added tokens as ids, as llguidance needs them."""
    return " ".join(_split_parts(text, tokenizer.added_tokens))


def _split_parts(text: str, added: dict[str, int]) -> Iterator[str]:
    while text:
        places = [(text.index(token), token) for token in added if token in text]
        at, token = min(places, default=(len(text), ""))
        if at:
            yield json.dumps(text[:at])
        if token:
            yield f"<[{added[token]}]>"
        text = text[at + len(token) :]


def write_tagged_rules(
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
        rules += _write_member_rules(member, tags, key, part, schema, literal)
    opening = literal(form.lead + form.begin + tags.name[0] + name + tags.name[1])
    closing = literal(tags.end + form.end)
    return [f"{rule}: {opening} {' '.join(members)} {closing}", *rules]


def _write_member_rules(
    rule: str, tags: Tags, key: str, part: Any, root: Mapping[str, Any], literal: Callable[..., str]
) -> list[str]:
    """Write the rules for one argument with its tags."""

    def tagged(value: str, *, string: bool) -> str:
        before, after = tags.value if string or tags.other is None else tags.other
        return f"{literal(tags.key + key + before)} {value} {literal(after)}"

    part = part if isinstance(part, Mapping) else {}
    values = [part["const"]] if "const" in part else part.get("enum")
    if isinstance(values, list) and values:
        choices = [tagged(literal(as_text(v)), string=isinstance(v, str)) for v in values]
        return [f"{rule}: {' | '.join(choices)}"]
    if "string" in list_allowed_types(part, root, {}):
        return _write_text_rules(rule, tags, key, part, literal)
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    schema = prepare_schema(json.dumps({**shared, **part}))
    return [
        f"{rule}: {tagged(f'{rule}_value', string=False)}",
        f"{rule}_value: %json {json.dumps(schema)}",
    ]


def _write_text_rules(
    rule: str, tags: Tags, key: str, part: Mapping[str, Any], literal: Callable[[str], str]
) -> list[str]:
    """Write the rules for a string argument, which ends where its closing tag begins."""
    if "pattern" in part:
        raise ValueError(f"a pattern of {key!r:.60}")
    low = part.get("minLength", 0)
    high = part.get("maxLength", "")
    length = f"{{{low},{high}}}" if low or high != "" else "*"
    opening, close = literal(tags.key + key + tags.value[0]), tags.value[1]
    line = close.endswith("\n")
    end = literal(close.removesuffix("\n"))
    text, after = f"{rule}_text", literal("\n") if line else ""
    if end.startswith("<["):  # a special token, which can't occur in the text
        return [f"{rule}: {opening} {text} {end} {after}", f"{text}: /(?s:.){length}/"]
    if "<[" in end:
        raise ValueError("a closing tag that is a token in part")
    return [f"{rule}: {opening} {text} {after}", f"{text}[suffix={end}]: /(?s:.){length}/"]
