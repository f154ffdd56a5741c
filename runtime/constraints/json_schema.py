"""Preparation of JSON schemas for llguidance, so that its output always fits the schema."""

import itertools
import math
import re
from collections.abc import Callable, Iterator
from json import dumps, loads
from typing import Any

from mtpbuild.runtime.constraints.json_patterns import FORMATS, translate_pattern

Json = dict[str, Any]

NAMED = ("properties", "$defs", "definitions", "patternProperties")  # maps of names to schemas
PARTS = ("items", "prefixItems", "anyOf", "oneOf", "allOf", "additionalProperties")
COMBINING = {"allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties", "dependentSchemas"}
OF_OBJECTS = {"properties", "required", "additionalProperties", "minProperties", "maxProperties"}
COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
DRAFT = re.compile(r"https?://json-schema\.org/draft(/2020-12|/2019-09|-0[467])/schema#?")
EXACT = 2**53  # up to it all whole numbers are floats, as llguidance's constants and bounds are
LARGEST_BOUND = 2**63 - 1024  # the largest float that llguidance takes as a bound of integers
# In a schema's text: a control character without a short escape, or a pattern's escape for it.
CONTROLS = re.compile(r"\\u00[01]|\x7f|\\\\[xuc0]")


def prepare_schema(text: str) -> Json:
    """Read and rewrite a schema; raise ValueError if it is invalid or cannot be followed."""
    schema = loads(text, parse_float=parse_finite, parse_constant=parse_finite)
    if schema is False:
        raise ValueError("nothing fits the schema false")
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise ValueError("a schema is an object, true or false")
    close_objects(schema)
    schema = _rewrite(schema)
    json_text = dumps(schema, ensure_ascii=False)
    # With \u escapes an additional property could be another spelling of a listed name.
    escapes = 'nrbtf\\"u' if CONTROLS.search(json_text) else 'nrbtf\\"'
    options = {"whitespace_flexible": False, "json_allowed_escapes": escapes}
    return {**schema, "x-guidance": options}


def make_object_schema(schema: Any) -> Json:
    """Return a schema of the objects that fit `schema`; None or true allows all objects."""
    if schema is None or schema is True:
        return {"type": "object"}
    if not isinstance(schema, dict):
        raise ValueError("parameters must be a JSON schema of an object")
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise ValueError(f"parameters must be of type object, not {kinds!r:.60}")
    return {**schema, "type": "object"}


def close_objects(schema: Json) -> None:
    """Limit a schema's objects to the properties that it lists or requires.

    Otherwise a model could keep inventing properties. Whatever fits the result fits the schema. A
    schema that combines properties from several places stays unchanged.
    """
    parts = [*_walk_subschemas(schema)]
    if any("allOf" in p or (OF_OBJECTS & p.keys() and COMBINING & p.keys()) for p in parts):
        return
    if not all(_are_disjoint(p["oneOf"], schema) for p in parts if "oneOf" in p):
        return  # a value that fits one alternative, once closed, could fit another if open
    for part in parts:
        if isinstance(listed := part.get("properties"), dict):
            if "additionalProperties" not in part and isinstance(part.get("required"), list):
                needed = [name for name in part["required"] if isinstance(name, str)]
                listed.update({name: True for name in needed if name not in listed})
            part.setdefault("additionalProperties", False)


def map_subschemas(schema: Json, change: Callable[[Any], Any]) -> Json:
    """Return a copy of a schema with `change` applied to each schema directly inside it."""
    copy: Json = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            value = {name: change(inner) for name, inner in value.items()}
        elif key in PARTS:
            value = [change(part) for part in value] if isinstance(value, list) else change(value)
        copy[key] = value
    return copy


def _are_disjoint(parts: Any, root: Json) -> bool:
    """Tell whether no value fits two parts of a `oneOf`.

    Two parts are known to be disjoint by their types, or by constants of a required property.
    """
    if not isinstance(parts, list):
        return False
    targets = [_resolve_target(part, root) for part in parts]
    return all(_differ(one, other) for one, other in itertools.combinations(targets, 2))


def _resolve_target(part: Any, root: Json) -> Json:
    """Return a schema, or the definition that it refers to."""
    if isinstance(part, dict) and isinstance(reference := part.get("$ref"), str):
        part = resolve_reference(reference, root)
    return part if isinstance(part, dict) else {}


def _differ(one: Json, other: Json) -> bool:
    kinds = [part.get("type") for part in (one, other)]
    if all(isinstance(kind, str) for kind in kinds) and kinds[0] != kinds[1]:
        return {*kinds} != {"integer", "number"}
    mine, others = _find_constants(one), _find_constants(other)
    return any(mine[name].isdisjoint(others[name]) for name in mine.keys() & others.keys())


def _find_constants(schema: Json) -> dict[str, set[str]]:
    """Return the constants of required properties by name, and of the value itself by ""."""
    required, listed = schema.get("required"), schema.get("properties")
    parts: Json = {"": schema}
    if schema.get("type") == "object" and isinstance(required, list) and isinstance(listed, dict):
        parts |= {name: listed.get(name) for name in required if isinstance(name, str)}
    limited = {}
    for name, inner in parts.items():
        match inner:
            case {"const": value}:
                limited[name] = {dumps(_simplify(value), sort_keys=True)}
            case {"enum": list(values)}:
                limited[name] = {dumps(_simplify(value), sort_keys=True) for value in values}
    return limited


def parse_finite(text: str) -> float:
    """Parse a number of a JSON text; raise ValueError for an infinity or NaN."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text:.40} is not a finite number")
    return number


def resolve_reference(reference: str, root: Json) -> Any:
    """Return the target of a reference of the form `#/a/b`; None if it does not exist."""
    head, *steps = reference.split("/")
    target: Any = root if head == "#" else None
    for step in steps:
        step = step.replace("~1", "/").replace("~0", "~")
        target = target.get(step) if isinstance(target, dict) else None
    return target


def _walk_subschemas(schema: Any) -> Iterator[Json]:
    """Yield a schema and all schemas inside it."""
    if not isinstance(schema, dict):
        return
    yield schema
    inner: list[Any] = []
    map_subschemas(schema, inner.append)
    for part in inner:
        yield from _walk_subschemas(part)


def _rewrite(schema: Any) -> Any:
    """Rewrite valid schemas that llguidance would refuse or follow inexactly."""
    if not isinstance(schema, dict):
        return schema
    schema = map_subschemas(schema, _rewrite)
    for key in COUNTS & schema.keys():
        if isinstance(schema[key], float) and schema[key].is_integer():
            schema[key] = int(schema[key])
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if not DRAFT.fullmatch(str(schema.get("$schema", ""))):
        schema.pop("$schema", None)
    _rewrite_texts(schema)
    _rewrite_bounds(schema)
    if "oneOf" in schema and "anyOf" not in schema and _are_disjoint(schema["oneOf"], {}):
        schema["anyOf"] = schema.pop("oneOf")  # no value fits two of its parts
    _check_properties(schema)
    return schema


def _rewrite_texts(schema: Json) -> None:
    """Narrow formats by patterns, and translate all patterns to Rust's syntax."""
    if isinstance(named := schema.get("patternProperties"), dict):
        schema["patternProperties"] = {
            translate_pattern(name): inner for name, inner in named.items()
        }
    patterns = [schema["pattern"]] if isinstance(schema.get("pattern"), str) else []
    if isinstance(schema.get("format"), str):
        native, narrower = FORMATS.get(schema.pop("format"), (None, []))  # others: annotations
        schema |= {"format": native} if native else {}
        patterns += narrower
    patterns = [*map(translate_pattern, patterns)]
    if patterns:
        schema["pattern"] = patterns[0]
    if len(patterns) > 1:
        kind = {"type": schema["type"]} if "type" in schema else {}
        parts = [{**kind, "pattern": pattern} for pattern in patterns[1:]]
        schema["allOf"] = [*schema.get("allOf", []), *parts]


def _rewrite_bounds(schema: Json) -> None:
    """Write bounds beyond 2^53 as inclusive floats; raise ValueError for such constants."""
    largest = EXACT if "number" in str(schema.get("type", "number")) else LARGEST_BOUND
    for name, step in (("minimum", 1), ("maximum", -1)):
        exclusive = f"exclusive{name.capitalize()}"
        bound = schema.pop(exclusive, None)
        if isinstance(bound, bool):  # as in draft 4
            bound = schema.pop(name, None) if bound else None
        if isinstance(bound, int | float) and abs(bound) >= EXACT:
            tightest = max if step > 0 else min
            inside = int(bound) + step  # floats of this size are whole
            schema[name] = tightest(inside, schema.get(name, inside))
        elif bound is not None:
            schema[exclusive] = bound
        if isinstance(bound := schema.get(name), int | float) and abs(bound) > EXACT:
            schema[name] = _round_bound(bound, step, largest)
    loads(dumps([schema.get("const"), schema.get("enum")]), parse_int=_parse_exact)


def _round_bound(bound: float, step: int, largest: int) -> int:
    """Return the float nearest to a bound among those inside it and up to `largest`.

    step: 1 for a minimum, -1 for a maximum. Raises ValueError if there is none.
    """
    rounded = float(bound)
    if rounded * step < bound * step:
        rounded = math.nextafter(rounded, step * math.inf)
    if rounded * step > largest:
        raise ValueError(f"a bound of {bound:.40g} is not supported")
    return step * max(int(rounded) * step, -largest)


def _parse_exact(text: str) -> int:
    """Parse a whole number; raise ValueError for one that floats may change."""
    if abs(number := int(text)) > EXACT:
        raise ValueError(f"the constant {text:.40} is not supported: it is beyond 2^53")
    return number


def _simplify(value: Any) -> Any:
    """Return a value with 1.0 as 1, as JSON schema does not distinguish them."""
    if isinstance(value, dict):
        return {name: _simplify(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_simplify(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_properties(schema: Json) -> None:
    """Drop a redundant minProperties; raise ValueError for others if names are open.

    With open names llguidance counts a repeated property twice.
    """
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    if not isinstance(least, int) or not isinstance(required, list):
        return
    if least <= len({*required} if all(isinstance(n, str) for n in required) else ()):
        schema.pop("minProperties", None)
    elif least > 1 and (
        schema.get("additionalProperties") is not False or "patternProperties" in schema
    ):
        raise ValueError("minProperties above 1 is not supported where names are open")
