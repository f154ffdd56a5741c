"""Limits of the size of forms, so that compiling a form takes about a second and 150 MB."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from mtpbuild.runtime.sampling.structured_outputs import make_form_error

LONGEST = 256 * 1024  # characters of a form
LONGEST_GRAMMAR = 32 * 1024  # characters of a Lark grammar without the schemas in it
LONGEST_GBNF = 8 * 1024  # characters; its translation takes quadratic time
# Where compilation takes quadratic time, the sum of the squared sizes is limited to the square.
MAX_PROPERTIES = 3000
LONGEST_PATTERN = 8 * 1024
SCHEMA = re.compile(r"%json\s*")
PATTERN = re.compile(r"/(?:[^/\\\n]|\\.)+/")


def check_form(kind: str, text: str) -> None:
    """Raise RequestError for a form that would take too long to compile.

    kind: json, regex, choice or grammar. Invalid JSON and invalid grammars pass; their compiler
    reports them.
    """
    if len(text) > LONGEST:
        raise make_form_error(f"longer than {LONGEST} characters")
    if kind == "json":
        _check_schemas(_split_schemas(f"%json {text}")[1])
    elif kind == "regex":
        _check_limit("characters of patterns", len(text), LONGEST_PATTERN)
    elif kind == "grammar":
        rest, schemas = _split_schemas(text)
        gbnf = "::=" in text
        _check_limit("characters of rules", len(rest), LONGEST_GBNF if gbnf else LONGEST_GRAMMAR)
        _check_squares("characters of patterns", map(len, PATTERN.findall(rest)), LONGEST_PATTERN)
        _check_schemas(schemas)


def _check_schemas(schemas: list[Any]) -> None:
    objects = [entry for schema in schemas for entry in _walk_objects(schema)]
    named, matched = (
        [entry[name] for entry in objects if isinstance(entry.get(name), dict)]
        for name in ("properties", "patternProperties")
    )
    _check_squares("properties", map(len, named), MAX_PROPERTIES)
    patterns = [entry["pattern"] for entry in objects if isinstance(entry.get("pattern"), str)]
    patterns += [pattern for entry in matched for pattern in entry]
    _check_squares("characters of patterns", map(len, patterns), LONGEST_PATTERN)


def _split_schemas(grammar: str) -> tuple[str, list[Any]]:
    """Return a Lark grammar without its JSON schemas, and the schemas."""
    rest, schemas, begin = list[str](), list[Any](), 0
    while match := SCHEMA.search(grammar, begin):
        rest.append(grammar[begin : match.end()])
        try:
            schema, begin = json.JSONDecoder().raw_decode(grammar, match.end())
            schemas.append(schema)
        except (ValueError, RecursionError):
            begin = match.end()
    return "".join([*rest, grammar[begin:]]), schemas


def _walk_objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield each object inside a JSON value."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
            pending += value.values()
        elif isinstance(value, list):
            pending += value


def _check_limit(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise make_form_error(f"{count} {what}, at most {limit} are compiled")


def _check_squares(what: str, sizes: Iterable[int], limit: int) -> None:
    counts = list(sizes)
    if sum(size**2 for size in counts) > limit**2:
        raise make_form_error(f"{sum(counts)} {what}, at most {limit} are compiled in one place")
