"""What a prepared schema lets through, beside a strict validator."""

import json
import re
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from mtpbuild.runtime import RequestError, StructuredOutputs
from mtpbuild.runtime.constraints.grammar import _write_source
from mtpbuild.runtime.constraints.json_patterns import translate_pattern
from mtpbuild.runtime.constraints.json_schema import make_object_schema

BYTES = LLTokenizer("byte")
END = BYTES.eos_token
BIG = 2**53 + 1


def matcher(schema: Any) -> LLMatcher:
    made = LLMatcher(BYTES, _write_source(StructuredOutputs(json=schema)), log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def takes(schema: Any, text: str) -> bool:
    asked, raw = matcher(schema), [*text.encode()]
    return asked.try_consume_tokens(raw) == len(raw) and asked.is_accepting()


def text_of(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


def format_of(name: str) -> dict[str, Any]:
    return {"type": "string", "format": name}


INT, BOOL = {"type": "integer"}, {"type": "boolean"}
OBJECT = {"type": "object"}
CASES: list[tuple[Any, list[str], list[str]]] = [
    # A class excludes what it excludes, escaped or not.
    (text_of('^[^"]{3}$'), ['"abc"', r'"a\nb"', r'"a\\b"'], [r'"a\"b"', r'"a\u0022b"', '"ab"']),
    (text_of(r"^[^\\]$"), ['"a"', r'"\""'], [r'"\\"']),
    (text_of(r'^[^"\\]*$'), ['""', r'"\n"'], [r'"\\"', r'"\""']),
    (text_of(r"^[\x00-\x1f]$"), [r'"\n"', r'"\u0001"'], [r'"\""', r'"\\"', '"a"']),
    (text_of(r"^\p{Cc}$"), [r'"\n"'], [r'"\""', r'"\\"']),
    (text_of("^[ -!#-~]$"), ['"#"', r'"\\"'], [r'"\""', r'"\n"']),
    (text_of(r"^\W$"), [r'"\""', r'"\n"'], ['"a"']),
    (text_of("^.$"), ['"a"', r'"\t"', r'"\""'], [r'"\n"', r'"\r"', '"\u2028"', r'"\u000a"']),
    (text_of(r"^[\s\S]$"), [r'"\n"', '"\u2028"', '"a"'], []),
    (text_of(r"^[^\n]$"), ['"a"'], [r'"\n"']),
    (text_of(r"^\S$"), ['"a"'], ['"\u3000"', '" "', r'"\t"']),
    (text_of("a"), ['"bab"'], ['"b"']),
    (text_of(r"^[[\]&~-]\/{1,2}?$"), ['"[/"', '"]//"', '"-/"'], ['"a/"']),
    (text_of(r"^\uD83D\uDE00[^]\x41$"), ['"😀bA"'], ['"😀A"']),
    (text_of("^a{$"), ['"a{"'], []),
    # Bounds beyond 2^53 move to the next float inside.
    (INT | {"minimum": BIG, "maximum": BIG + 2}, [str(BIG + 1)], [str(BIG), str(BIG + 2)]),
    (INT | {"exclusiveMaximum": -BIG}, [str(-BIG - 1)], [str(-BIG), "0"]),
    (INT | {"maximum": 2**64 - 1, "minimum": 0}, ["0", str(10**18 + 1)], [str(2**64), "-1"]),
    (INT | {"maximum": 2**63 - 1, "minimum": -(2**63)}, [str(BIG), "-1"], [str(2**63)]),
    ({"type": ["integer", "null"], "minimum": BIG}, ["null", str(BIG + 1)], [str(BIG - 1)]),
    ({"type": "number", "maximum": 1e300}, ["0.5", "-3", str(2**53)], [str(2**53 + 2)]),
    ({"maximum": 2**64}, ["null", '"a"', "5"], [str(2**64 + 1)]),
    ({"allOf": [INT | {"maximum": 2**64}]}, ["5", str(2**53)], [str(2**64 + 1)]),
    ({"type": "number", "exclusiveMaximum": 0.3}, ["0.29", "0.2"], ["0.3", "0.30"]),
    ({"type": "number", "maximum": 3, "exclusiveMaximum": True}, ["2.5"], ["3"]),
    # Formats.
    (format_of("date"), ['"2024-02-29"', '"2000-02-29"'], ['"2023-02-29"', '"1900-02-29"']),
    (format_of("date"), ['"2023-04-30"'], ['"2024-02-30"', '"2023-04-31"', '"0000-01-01"']),
    (format_of("date-time"), ['"2024-02-29T23:59:59Z"', '"2024-01-01T00:00:00.5+01:30"'],
     ['"2023-02-29T00:00:00Z"', '"2024-01-01T24:00:00Z"', '"2024-01-01T23:59:60Z"']),
    (format_of("time"), ['"23:59:59Z"'], ['"24:00:00Z"', '"23:59:60Z"', '"23:59:59"']),
    (format_of("hostname"), ['"a-b.example"'], ['"-a"', '"a..b"', f'"{"a" * 64}"']),
    (format_of("email"), ['"a.b@c.de"'], ['"a@"', '"a..b@c"', f'"{"a" * 65}@b"']),
    (format_of("date") | {"pattern": "^20"}, ['"2023-01-01"'], ['"1999-01-01"']),
    (format_of("date") | {"enum": ["2023-02-29", "x", "2024-02-29"]}, ['"2024-02-29"'], ['"x"']),
    (format_of("password"), ['"x"'], ["1"]),
    ({"format": "int32"}, ["1", '"x"'], []),
    # Properties.
    (OBJECT | {"properties": {"a": BOOL}, "required": ["b"]}, ['{"b":[1]}'], ["{}", '{"c":1}']),
    (
        OBJECT | {"anyOf": [{"properties": {"a": BOOL}}, {"properties": {"b": BOOL}}]}
        | {"required": ["c"]},
        ['{"a":true,"c":1}', '{"b":true,"c":1}'],
        ['{"a":true}'],
    ),
    (OBJECT | {"properties": {"a": INT}, "additionalProperties": {"type": "string"}},
     ['{"a":1,"b":"x"}'], ['{"a":"x"}', r'{"\u0061":"x"}']),
    ({"patternProperties": {'^[^"]$': INT}, "additionalProperties": False, "type": "object"},
     ['{"a":1}'], [r'{"\"":1}']),
    (OBJECT | {"minProperties": 1}, ['{"a":1}'], ["{}"]),
    ({"oneOf": [{"const": 1, "title": "one"}, {"const": 2}]}, ["1", "2"], ["3"]),
    ({"oneOf": [OBJECT | {"properties": {"k": {"const": k}}, "required": ["k"]} for k in "ab"]},
     ['{"k":"a"}', '{"k":"b"}'], ['{"k":"a","l":1}']),
    ({"const": None}, ["null"], ["0"]),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": INT}}, ["3"], ["2"]),
    (True, ["1", "{}", "null"], []),
    ({"type": "string", "maxLength": 1.0, "deprecated": True, "nullable": True}, ['"a"'], ['"ab"']),
    ({"type": "array", "uniqueItems": False}, ["[1,1]"], []),
    ({"$schema": "https://example.org/mine", "type": "integer"}, ["1"], []),
    ({"const": "\x01\x7f"}, [r'"\u0001\u007F"'], []),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_what_a_schema_takes(number: int) -> None:
    schema, right, wrong = CASES[number]
    for text in right:
        assert takes(schema, text), text
    for text in wrong:
        assert not takes(schema, text), text


@pytest.mark.parametrize(
    ("schema", "says"),
    [(False, "nothing fits the schema false"),
     ({"maximum": float("inf")}, "Infinity is not a finite number"),
     (INT | {"multipleOf": BIG}, "'multipleOf' has too many digits"),
     ({"allOf": [{"enum": [{"a": BIG}]}]}, f"constant {BIG} is not supported"),
     (INT | {"minimum": 2**63}, f"a bound of {2**63} is not supported"),
     ({"type": "number", "exclusiveMaximum": -(10**30)}, "is not supported"),
     (INT | {"minimum": BIG + 1, "maximum": BIG}, "minimum"),
     (OBJECT | {"minProperties": 2}, "minProperties above 1 is not supported where names"),
     ({"oneOf": [{}, {"properties": {"a": {}}}]}, "oneOf"), ({"if": {}, "const": 1}, '"if"'),
     ({"properties": {}, "required": [[]]}, "required"), ({"contains": {}}, '"contains"'),
     ({"dependentRequired": {}}, '"dependentRequired"'),
     ({"propertyNames": {}}, '"propertyNames"'),
     ({"unevaluatedProperties": False}, '"unevaluatedProperties"')],
)  # fmt: skip
def test_what_is_refused_by_name(schema: Any, says: str) -> None:
    with pytest.raises((RequestError, AssertionError), match=re.escape(says)):
        matcher(schema)


def test_patterns_of_neither_syntax_stay() -> None:
    for pattern in ("(?=a)b", r"\1", r"\b", "\\"):
        assert translate_pattern(pattern) == pattern


def test_arguments_are_objects() -> None:
    for given_schema in (None, True, {}, {"type": ["object", "null"]}, OBJECT):
        assert make_object_schema(given_schema) == OBJECT
    others: list[Any] = [{"type": "string"}, {"type": ["array"]}, False, []]
    for other in others:
        with pytest.raises(ValueError, match="parameters must be"):
            make_object_schema(other)


def random_schema(rng: np.random.Generator, depth: int) -> Any:
    """Return a schema of every kind that is taken, whose texts are short."""

    def inner() -> Any:
        return random_schema(rng, depth - 1)

    low = int(rng.integers(-5, 5)) + int(rng.choice([0, 10, -(2**53), 2**53, 2**60])) * 7
    leaves: list[Any] = [
        INT | {"minimum": low, "maximum": low + int(rng.integers(9, 9000))},
        INT | {"exclusiveMinimum": low, "exclusiveMaximum": low + 9000},
        {"type": "number", "minimum": 0.25, "exclusiveMaximum": 0.3},
        {"enum": [2**53, "a<think>", None, 0.5, {"x": low % 99}]},
        {"const": str(rng.choice(["\\", '"', "\n", "é"]))},
        text_of(str(rng.choice(['^[^"]{0,3}$', r"^[^\\]{2}$", "^.{1,3}$", r"^\S\W$", "^[^a-z]$"]))),
        format_of(str(rng.choice(["date", "date-time", "time", "ipv4", "ipv6", "uuid"]))),
        format_of(str(rng.choice(["email", "hostname", "uri", "duration"]))) | {"maxLength": 12},
        {"type": "string", "maxLength": 2.0, "format": "password"},
        {"type": ["boolean", "null"], "deprecated": True},
    ]
    if depth == 0 or rng.random() < 0.3:
        return leaves[int(rng.integers(len(leaves)))]
    names = ["a", "<think>", 'b"', "ключ"]
    listed = OBJECT | {"properties": {name: inner() for name in names if rng.random() < 0.6}}
    nodes: list[Any] = [
        listed | {"required": [name for name in names if rng.random() < 0.3]},
        listed | {"additionalProperties": False},
        {"type": "array", "items": inner(), "minItems": 1, "maxItems": 3},
        {"anyOf": [inner(), inner()]},
        {"oneOf": [OBJECT | {"properties": {"k": {"const": k}}, "required": ["k"]} for k in "xy"]},
    ]
    return nodes[int(rng.integers(len(nodes)))]


def walked(asked: LLMatcher, rng: np.random.Generator) -> str | None:
    """Return a random text of a grammar, with many special bytes; None if it has no end."""
    output = bytearray()
    while len(output) < 600:
        mask = np.frombuffer(asked.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if END in allowed and (len(allowed) == 1 or rng.random() < 0.3):
            return output.decode()
        allowed = allowed[allowed != END]
        special = [token for token in allowed if token in b'"\\]},0']
        token = int(rng.choice(special if special and rng.random() < 0.4 else allowed))
        output.append(token)
        assert asked.consume_token(token)
    return None


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_what_is_said_fits(seed: int) -> None:
    """Random texts of random schemas, to a validator that checks formats."""
    rng = np.random.default_rng(seed)
    schema = random_schema(rng, 3)
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    for _ in range(4):
        text = walked(matcher(schema), rng)
        assert text is None or validator.is_valid(json.loads(text)), (schema, text)
