"""Grammars for schemas with numbers beyond 2^53; llguidance's own bounds are floats."""

import contextlib
import math
import re
from collections.abc import Callable
from json import dumps
from typing import Any, TypeGuard

from mtpbuild.runtime.constraints.json_schema import (
    ANNOTATIONS,
    Json,
    map_subschemas,
    resolve_reference,
)

EXACT = 2**53
BOUNDS = ("minimum", "maximum")
DEFINITIONS = ("$defs", "definitions")
SHARED = {*DEFINITIONS, "x-guidance"}
OBJECT = {"properties", "required", "additionalProperties"}
MAX_ITEMS = 10_000


def has_large_numbers(schema: Json) -> bool:
    """Tell whether a prepared schema needs rules, because floats would change its numbers."""
    return _Rules(schema, "").has_large(schema)


def write_json_rules(schema: Json, name: str) -> str:
    """Return rules in Lark's syntax; rule `name` matches the values that fit a prepared schema.

    Raises ValueError if a number cannot be followed exactly.
    """
    from llguidance import LLMatcher

    rules = _Rules(schema, name)
    if rules.has_large(schema):  # llguidance checks the types of its keywords
        grammar = LLMatcher.grammar_from_json_schema(dumps(_clamp(schema)))
        if error := LLMatcher.validate_grammar(grammar):
            raise ValueError(error)
    value = rules.value(schema)
    return "\n".join([f"{name}: {value}", *rules.lines])


class _Rules:
    """The rules of one schema; parts that llguidance follows exactly stay JSON."""

    def __init__(self, root: Json, name: str) -> None:
        self._root, self._name = root, name
        self._names: dict[str, str] = {}  # reference -> name of its rule
        self.lines: list[str] = []

    def value(self, schema: Any) -> str:
        """Return an expression that matches the values that fit a schema."""
        if not self.has_large(schema):
            return f"%json {dumps(self._with_definitions(schema))}"
        keys = schema.keys() - ANNOTATIONS - SHARED
        if keys == {"$ref"}:
            return self._match_reference(schema["$ref"])
        if keys <= {"const", "type"} or keys <= {"enum", "type"}:
            return self._match_constants(schema)
        if keys == {"anyOf"}:
            return self._join_any([self.value(part) for part in schema["anyOf"]])
        kinds = schema.get("type", [*TYPES] if keys <= {*BOUNDS} else None)
        if isinstance(kinds, list):
            return self._join_any([self.value(_limit_to_kind(schema, kind)) for kind in kinds])
        if kinds in ("integer", "number") and keys <= {"type", *BOUNDS}:
            return self._match_number(schema)
        closed = schema.get("additionalProperties") is False
        if kinds == "object" and closed and keys - {"type"} <= OBJECT:
            return self._match_object(schema)
        if kinds == "array" and keys <= {"type", "items", "minItems", "maxItems"}:
            return self._match_array(schema)
        return f"%json {dumps(_narrow_bounds(self._with_definitions(schema), keys))}"

    def has_large(self, schema: Any) -> bool:
        """Tell whether a schema, with all that it refers to, has a number that floats would change.

        Without recursion: references may follow each other thousands of times.
        """
        followed, pending = set[str](), [schema]
        while pending:
            part = pending.pop()
            if not isinstance(part, dict):
                continue
            if _has_large(part):
                return True
            if isinstance(reference := part.get("$ref"), str) and reference not in followed:
                followed.add(reference)
                pending.append(resolve_reference(reference, self._root))
            inside = {key: inner for key, inner in part.items() if key not in DEFINITIONS}
            map_subschemas(inside, pending.append)
        return False

    def _with_definitions(self, schema: Any) -> Json:
        """Return a schema together with the definitions that it may refer to."""
        if not isinstance(schema, dict):
            schema = {} if schema else {"enum": []}
        return {key: self._root[key] for key in SHARED if key in self._root} | schema

    def _match_reference(self, reference: str) -> str:
        if reference not in self._names:
            rule = self._names[reference] = f"{self._name}_{len(self._names)}"
            self.lines.append(f"{rule}: {self.value(resolve_reference(reference, self._root))}")
        return self._names[reference]

    def _join_any(self, parts: list[str]) -> str:
        if not parts:
            raise ValueError("nothing fits the schema")
        return f"({' | '.join(parts)})"

    def _match_constants(self, schema: Json) -> str:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        kinds = schema.get("type", [*TYPES])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        allowed = [_is_integer if kind == "integer" else TYPES[kind] for kind in kinds]
        return self._join_any(
            [_quote_text(v) for v in values if any(is_one(v) for is_one in allowed)]
        )

    def _match_number(self, schema: Json) -> str:
        """Return an expression for the integers in the bounds, and for fractions up to 2^53."""
        low, high = (schema.get(bound) for bound in BOUNDS)
        low = None if low is None else math.ceil(low)
        high = None if high is None else math.floor(high)
        integer = f"/{match_integers(low, high)}/"
        with contextlib.suppress(ValueError):
            if schema["type"] == "number":
                narrowed = _narrow_bounds(self._with_definitions(schema), set())
                return f"({integer} | %json {dumps(narrowed)})"
        return integer

    def _match_object(self, schema: Json) -> str:
        """Return an expression for an object with the listed properties, in their order."""
        listed, required = schema.get("properties", {}), schema.get("required", [])
        firsts, rest = ['""'], '""'
        for name, inner in reversed(listed.items()):
            item = self._add_rule(f'{_quote_text(name)} ":" {self.value(inner)}')
            first, needed = f"{item} {rest}", name in required
            firsts = [first] if needed else [first, *firsts]
            rest = self._add_rule(f'"," {item} {rest}' if needed else f'("," {item})? {rest}')
        return f'"{{" {self._join_any(firsts)} "}}"'

    def _add_rule(self, value: str) -> str:
        """Add a rule, and return its name."""
        rule = f"{self._name}_v{len(self.lines)}"
        self.lines.append(f"{rule}: {value}")
        return rule

    def _match_array(self, schema: Json) -> str:
        low = schema.get("minItems", 0)
        high = schema.get("maxItems")
        if max(low, high or 0) > MAX_ITEMS:
            raise ValueError(f"more than {MAX_ITEMS} items with numbers beyond 2^53")
        item = self._add_rule(self.value(schema.get("items", True)))
        others = f'("," {item}){{{max(low - 1, 0)},{"" if high is None else max(high - 1, 0)}}}'
        items = "" if high == 0 else f"({item} {others}){'' if low else '?'}"
        return f'"[" {items} "]"'


def match_integers(low: int | None, high: int | None) -> str:
    """Return a pattern of the integers from `low` to `high`; None: no bound."""
    if low is not None and high is not None and low > high:
        raise ValueError(f"no whole number is between {low} and {high}")
    parts = []
    if low is None or low < 0:
        smallest = 1 if high is None or high >= 0 else -high
        parts.append(f"-(?:{_match_digits(smallest, None if low is None else -low)})")
    if high is None or high >= 0:
        parts.append(_match_digits(max(low or 0, 0), high))
    return "|".join(parts)


def _match_digits(low: int, high: int | None) -> str:
    """Return a pattern of the integers from `low`, which is not negative, to `high`."""
    if high is None:
        length = len(str(low))
        return f"{_match_digits(low, 10**length - 1)}|[1-9][0-9]{{{length},}}"
    # A part ends where the last digits of `low` become 9, or those of `high` + 1 become 0.
    powers = [10**power for power in range(1, len(str(high)) + 1)]
    ends = [low - low % power + power - 1 for power in powers]
    ends += [high - (high + 1) % power for power in powers]
    parts = []
    for end in sorted({high, *(end for end in ends if low <= end < high)}):
        parts.append(_match_same_length(str(low), str(end)))
        low = end + 1
    return "|".join(parts)


def _match_same_length(low: str, high: str) -> str:
    """Return a pattern of the integers from low to high, whose digits vary independently."""
    digits = (a if a == b else f"[{a}-{b}]" for a, b in zip(low, high, strict=True))
    return re.sub(r"(\[0-9\])+$", lambda run: f"[0-9]{{{len(run[0]) // 5}}}", "".join(digits))


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return _is_number(value) and value == math.floor(value)


TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "number": _is_number,
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def _is_large(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_is_large, value.values() if isinstance(value, dict) else value))
    return _is_number(value) and abs(value) > EXACT


def _has_large(schema: Json) -> bool:
    """Tell whether a schema's own keywords have a number that floats would change."""
    return any(_is_large(schema.get(key)) for key in ("const", "enum", "multipleOf", *BOUNDS))


def _clamp(value: Any) -> Any:
    """Return a JSON value whose numbers are moved to within 2^53."""
    if isinstance(value, dict):
        return {name: _clamp(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_clamp(inner) for inner in value]
    return max(-EXACT, min(EXACT, value)) if _is_number(value) else value


def _narrow_bounds(schema: Json, keys: set[str]) -> Json:
    """Move a schema's bounds to within 2^53; raise ValueError for other large numbers."""
    changed = map_subschemas(
        schema, lambda p: _narrow_bounds(p, keys) if isinstance(p, dict) else p
    )
    for key, sign in (("minimum", -1), ("maximum", 1)):
        if _is_number(bound := changed.get(key)) and bound * sign > EXACT:
            changed[key] = sign * EXACT
    if _has_large(changed):
        rest = ", ".join(sorted(keys - {"const", "enum", *BOUNDS})) or "no type"
        raise ValueError(f"a number beyond 2^53 is not supported beside {rest}")
    return changed


def _limit_to_kind(schema: Json, kind: object) -> Json:
    """Return a schema for one type, without the bounds if the type is not numeric."""
    dropped = () if kind in ("integer", "number") else BOUNDS
    return {key: part for key, part in schema.items() if key not in dropped} | {"type": kind}


def _quote_text(value: Any) -> str:
    """Return a value's JSON as a literal in Lark's syntax."""
    return dumps(dumps(value, ensure_ascii=False, separators=(",", ":")))
