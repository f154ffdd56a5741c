"""Conversion of arguments in tags, which are plain text, to the types of their schema."""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from mtpbuild.runtime.constraints.json_schema import resolve_reference
from mtpbuild.runtime.tool_calls.json_reader import parse_strictly, repair_json

NAMES = {"string", "number", "boolean", "null", "object", "array"}
ANY = frozenset(NAMES)
DEEPEST = 50  # nested schemas
PYTHON = {"True": True, "False": False, "None": None}  # some templates write Python's words


def convert_argument(text: str, schema: Any, root: Any, *, string: bool | None = None) -> Any:
    """Convert an argument: to a string if the schema allows one, else from JSON if it is valid.

    root: the schema of all arguments, which references point into. string: whether the tag marks
    the argument as a string; None if tags have no such mark.
    """
    types = list_allowed_types(schema, root, {})
    if string is None and (values := _list_meant(text, schema)):
        return values[0]
    if string is not None:
        types = frozenset({"string"}) if string else types - {"string"} or ANY - {"string"}
    if "string" in types and types != ANY:
        if "null" in types and text in ("null", "None"):
            return None
        opens = ("{",) * ("object" in types) + ("[",) * ("array" in types)
        if not opens or not text.lstrip().startswith(opens):
            return text
    word = text.strip()
    if word in PYTHON and name_json_type(PYTHON[word]) in types:
        return PYTHON[word]
    may_repair = "string" not in types and types & {"object", "array"}
    for parse in (parse_strictly, repair_json) if may_repair else (parse_strictly,):
        with contextlib.suppress(ValueError):  # a model may write anything: then it is a text
            return parse(text)
    return text


def find_schema(name: str, root: Any) -> Any:
    """Return an argument's schema; for an unknown argument, the schema of a string."""
    if not isinstance(root, Mapping):
        return {"type": "string"}
    properties = root.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    others = root.get("additionalProperties")
    return others if isinstance(others, Mapping) else {"type": "string"}


def _list_meant(text: str, schema: Any) -> list[Any]:
    """Return the enum's values that the text may mean; an equal string takes precedence."""
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    if not isinstance(values, list):
        return []
    return [v for v in values if v == text] or [v for v in values if text in (as_text(v), str(v))]


def list_allowed_types(
    schema: Any, root: Any, known: dict[str, frozenset[str]], depth: int = 0
) -> frozenset[str]:
    """Return the JSON types that a schema allows; all types if it names none.

    known: the types of references found so far. Integers count as numbers.
    """
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return ANY
    limits = [_list_own_types(schema)]
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in known:
            known[reference] = ANY  # for a reference that leads to itself
            known[reference] = list_allowed_types(
                resolve_reference(reference, root), root, known, depth + 1
            )
        limits.append(known[reference])
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        types = [
            list_allowed_types(part, root, known, depth + 1)
            for part in (parts if isinstance(parts, list) else [])
        ]
        limits += types if key == "allOf" or not types else [frozenset().union(*types)]
    return frozenset.intersection(*limits) or ANY


def _list_own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types allowed by a schema's own type, enum and const."""
    names = schema.get("type")
    names = names if isinstance(names, list) else [names]
    named = {"number" if name == "integer" else name for name in names if isinstance(name, str)}
    types = frozenset(named & NAMES) or ANY
    if isinstance(values := schema.get("enum"), list) and values:
        types &= {name_json_type(value) for value in values}
    return types & {name_json_type(schema["const"])} if "const" in schema else types


def name_json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "number", float: "number", dict: "object", list: "array"}
    return kinds.get(type(value), "null")


def as_text(value: Any) -> str:
    """Write a value as templates do: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
