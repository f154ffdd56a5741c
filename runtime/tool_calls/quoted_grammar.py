"""Lark rules for arguments with bare keys, whose strings stand between two marks."""

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from mtpbuild.runtime.constraints.json_schema import Json, map_subschemas, resolve_reference

T = TypeVar("T")
COMMA = ' "," '
PLAIN_KEY = r"[\w.$-]+"  # other keys stand between the marks
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
KEYWORDS = {
    "string": {"minLength", "maxLength"},
    "number": BOUNDS,
    "boolean": set[str](),
    "null": set[str](),
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
ANNOTATIONS = {"description", "title", "default", "examples", "deprecated", "readOnly", "writeOnly"}
ANNOTATIONS |= {"$schema", "$id", "$comment", "$defs", "definitions", "strict", "x-guidance"}


def drop_formats(schema: Any) -> Any:
    """Return a schema without formats, which are annotations in this notation."""
    if not isinstance(schema, Mapping):
        return schema
    return map_subschemas({k: v for k, v in schema.items() if k != "format"}, drop_formats)


class QuotedRules:
    """The rules of one function's arguments, in `lines`.

    Members of an object come in the schema's order, and an object with `properties` has no others.
    """

    def __init__(self, prefix: str, schema: Json, quote: str, mark: str) -> None:
        """Write the rules; raise ValueError for a schema that they can't express.

        prefix: begins the rules' names, and names the rule of all arguments. schema: a prepared
        one of an object. quote: the mark, which Lark spells as `mark`.
        """
        self.lines: list[str] = []
        self._prefix, self._root, self._quote, self._mark = prefix, schema, quote, mark
        self._names: dict[str, str] = {}  # of rules, by their bodies or schemas
        try:
            self.lines.append(f"{prefix}: {self._add(schema)}")
        except RecursionError:
            raise ValueError("schemas that are nested so deeply") from None

    def _define(self, body: str, *, terminal: bool = False, attributes: str = "") -> str:
        """Return the name of the rule with this body."""
        if body not in self._names:
            prefix = self._prefix.upper() if terminal else self._prefix
            self._names[body] = name = f"{prefix}_{len(self._names)}"
            self.lines.append(f"{name}{attributes}: {body}")
        return self._names[body]

    def _add(self, schema: Any) -> str:
        """Return the name of a schema's rule, which may refer to itself."""
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise ValueError(f"the schema {json.dumps(schema):.60}")
        limits = {name: value for name, value in schema.items() if name not in ANNOTATIONS}
        key = json.dumps(limits)
        if key not in self._names:
            self._names[key] = name = f"{self._prefix}_{len(self._names)}"
            self.lines.append(f"{name}: {' | '.join(self._list_choices(limits))}")
        return self._names[key]

    def _list_choices(self, schema: Json) -> list[str]:
        """Write the kinds of values that a schema without annotations allows."""
        values = [schema["const"]] if "const" in schema else _read(schema, "enum", list[Any]())
        if values:
            return [self._write_value(value) for value in values]
        match schema:
            case {"$ref": str(reference), **others} if not others:
                return [self._add(resolve_reference(reference, self._root))]
            case {"anyOf": [*parts], **others} | {"allOf": [*parts], **others} if not others:
                if parts[1:] and "allOf" in schema:
                    raise ValueError("allOf in a schema")
                return [self._add(part) for part in parts]
        kinds = schema.get("type") or [k for k, words in KEYWORDS.items() if words & schema.keys()]
        kinds = [str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])]
        known = {"type"}.union(*(KEYWORDS.get(kind, BOUNDS) for kind in kinds))
        if unknown := schema.keys() - known:
            raise ValueError(f"{min(unknown)} in a schema")
        return [self._write_kind(kind, schema) for kind in kinds or KEYWORDS]

    def _write_kind(self, kind: str, schema: Json) -> str:
        """Write the values of one type."""
        match kind:
            case "object":
                return self._write_object(schema)
            case "array":
                low, high = (_read(schema, name, 0) for name in ("minItems", "maxItems"))
                item = self._add(schema.get("items", True))
                many = _repeat(item, low, high if "maxItems" in schema else None)
                return f'"[" {many} "]"'
            case "string":
                low, high = (_read(schema, name, 0) for name in ("minLength", "maxLength"))
                return self._write_text(f"{{{low},{high if 'maxLength' in schema else ''}}}")
        bounds = {name: schema[name] for name in BOUNDS & schema.keys()}
        return self._define(f"%json {json.dumps({'type': kind, **bounds})}")

    def _write_text(self, length: str = "*") -> str:
        """Write the strings of such a length, which do not hold the mark."""
        text = f"/(?s:.){length}/"
        if not self._mark.startswith("<["):  # the mark is no token
            return f"{self._mark} {self._define(text, attributes=f'[suffix={self._mark}]')}"
        text += f" & ~/(?s:.*{re.escape(self._quote)}.*)/"
        return f"{self._mark} {self._define(text, terminal=True)} {self._mark}"

    def _write_object(self, schema: Json) -> str:
        needed = _read(schema, "required", list[Any]())
        if not all(isinstance(name, str) for name in needed):
            raise ValueError(f"required {json.dumps(needed):.60}")
        others = schema.get("additionalProperties", True)
        members = _read(schema, "properties", Json())
        members = {**members, **{name: others for name in needed if name not in members}}
        if not members and others is not False:
            key = self._define(f"/{PLAIN_KEY}/ | {self._write_text()}")
            pairs = _repeat(f'{key} ":" {self._add(others)}')
            return f'"{{" {pairs} "}}"'
        head = tail = '"}"'  # where no member stands before it, and where one does
        for name, part in reversed(members.items()):
            pair = f"{self._write_key(name)} {self._add(part)}"
            if name in needed:
                head, tail = f"{pair} {tail}", f'"," {pair} {tail}'
            else:
                head = self._define(f"{pair} {tail} | {head}")
                tail = self._define(f'("," {pair})? {tail}')
        return f'"{{" {head}'

    def _write_key(self, name: str) -> str:
        if re.fullmatch(PLAIN_KEY, name):
            return json.dumps(f"{name}:")
        return f'{self._write_value(name)} ":"'

    def _write_value(self, value: Any) -> str:
        """Write one value in this notation."""
        match value:
            case str():
                if self._quote in value:
                    raise ValueError(f"a text with {self._quote}")
                return f"{self._mark} {json.dumps(value) if value else ''} {self._mark}"
            case list():
                return f'"[" {COMMA.join(map(self._write_value, value))} "]"'
            case dict():
                pairs = [f"{self._write_key(k)} {self._write_value(v)}" for k, v in value.items()]
                return f'"{{" {COMMA.join(pairs)} "}}"'
        return json.dumps(json.dumps(value))


def _read(schema: Json, name: str, default: T) -> T:
    """Return a limit of a schema, of its default's type; raise ValueError for another type."""
    value = schema.get(name, default)
    if type(value) is not type(default):
        raise ValueError(f"{name} {json.dumps(value):.60}")
    return value


def _repeat(item: str, low: int = 0, high: int | None = None) -> str:
    """Write a list of items with commas between them."""
    if high == 0:
        return ""
    more = f"{{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
    items = f'{item} ("," {item}){more}'
    return items if low else f"({items})?"
