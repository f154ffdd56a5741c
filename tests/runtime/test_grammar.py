"""A request's grammar beside llguidance itself, on deepseek-tiny's tokenizer, without an engine."""

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.runtime import RequestError, SamplingParams, StructuredOutputs
from mtpbuild.runtime.constraints.grammar import GrammarMatcher, Grammars
from mtpbuild.runtime.constraints.json_schema import close_objects
from mtpbuild.runtime.contract.controls import GREEDY
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.errors import advise_install
from mtpbuild.runtime.text.tokenizer import Tokenizer, read_backend
from tests.support.fakes import fake_manifest
from tests.support.nasty_bodies import CHAIN, schema

EOS, THINK, END_OF_THOUGHT, VOCABULARY = 1, 2, 3, 2048
THINKING = replace(GREEDY, thinking=True, thinking_ids=(THINK, END_OF_THOUGHT), constrained=True)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}
JSON = StructuredOutputs(json=SCHEMA)
FORMS = {
    "json": JSON,
    "object": StructuredOutputs(json_object=True),
    "regex": StructuredOutputs(regex=r"[a-f]{2,5}(-[0-9]+)?"),
    "choice": StructuredOutputs(choice=["yes", "no", 'a "third"']),
    "lark": StructuredOutputs(grammar='start: "def " /[a-z]+/ "(" /[a-z]/ "):"'),
    "gbnf": StructuredOutputs(grammar='root ::= "x" ("+" [0-9])*'),
}
ABLE = frozenset({Feature.CONSTRAIN})  # of an engine's programs


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    return read_backend(find_model("deepseek-tiny").folder / "tokenizer.json")


def manifest(nextn: int = 3, vocabulary: int = VOCABULARY, **changes: Any) -> Manifest:
    return fake_manifest(nextn=nextn, vocab_size=vocabulary, eos=(EOS,), **changes)


@pytest.fixture(scope="module")
def grammars(backend: tokenizers.Tokenizer) -> Grammars:
    return Grammars(manifest(), Tokenizer(backend), ABLE)


def bits(allowed: NDArray[np.int32]) -> list[int]:
    """Return the tokens of a mask."""
    found = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little"))
    return [int(token) for token in found]


def follow(matcher: LLMatcher, tokens: list[int]) -> list[int]:
    """Return what llguidance allows behind these tokens, each taken in turn by a copy."""
    fresh = matcher.deep_copy()
    assert fresh.consume_tokens(tokens)
    mask = np.zeros((1, -(-VOCABULARY // 32)), np.int32)
    fill_next_token_bitmask(fresh, mask)
    return bits(mask[0])


@pytest.mark.parametrize("form", FORMS)
def test_masks_follow_the_drafts(form: str, grammars: Grammars) -> None:
    """Walks to the end of the grammar, whose steps judge good, bad and missing drafts."""
    rng = np.random.default_rng(len(form))
    found = [walk(FORMS[form], grammars, rng) for _ in range(8)]
    forced, replaced = (sum(counts) for counts in zip(*found, strict=True))
    assert forced or form in ("regex", "gbnf")
    assert replaced or form in ("regex", "gbnf")


def walk(form: StructuredOutputs, grammars: Grammars, rng: np.random.Generator) -> tuple[int, int]:
    """How many tokens were forced, and in how many steps drafts were replaced."""
    grammar, oracle = grammars.matcher(form, GREEDY), grammars._compile(form)
    output: list[int] = []
    forced = replaced = 0
    while EOS not in output and len(output) < 60:
        drafts: list[int] = []
        for _ in range(int(rng.integers(4))):
            good = follow(oracle, output + drafts) if EOS not in drafts else [EOS]
            drafts.append(int(rng.choice(good)) if rng.random() < 0.8 else 77)
            if drafts[-1] not in good:
                break
        drafts += rng.integers(16, VOCABULARY, 3 - len(drafts)).tolist()
        window = grammar.make_next_constraint(drafts)
        assert grammar.kept == window.kept
        assert window.drafts[: window.kept] == drafts[: window.kept]
        for row in range(4):
            path = window.drafts[:row]
            allowed = bits(window.allowed[row])
            if EOS in path or len(allowed) > VOCABULARY - 1:  # unreachable, so free
                break
            assert allowed == follow(oracle, output + path), "as if they had been taken"
            if row < len(window.drafts) and row >= window.kept:
                assert allowed == [window.drafts[row]], "a forced token is the only one"
                forced += 1
            if row < len(window.drafts) and window.drafts[row] not in allowed:
                break
        replaced += window.kept < len(drafts)
        token = int(rng.choice(follow(oracle, output)))
        output.append(token)
        if token != EOS:
            grammar.take(token)
    return forced, replaced


def test_ids_beyond_the_tokenizer(backend: tokenizers.Tokenizer) -> None:
    """A model's vocabulary may be wider: nobody can read those tokens."""
    wide = Grammars(manifest(vocabulary=VOCABULARY + 45), Tokenizer(backend), ABLE)
    free = StructuredOutputs(regex="(.|\n)*")
    mask = wide.matcher(free, GREEDY).make_next_constraint([]).allowed[0]
    assert mask.shape == (-(-(VOCABULARY + 45) // 32),)
    assert max(bits(mask)) < VOCABULARY
    assert not {0, THINK, END_OF_THOUGHT, 4, 5} & {*bits(mask)}, "special tokens are no text"
    assert EOS in bits(mask)


def test_a_thought_is_free(grammars: Grammars) -> None:
    """A thought's end may be a draft: rows behind it are masked, and tokens behind it count."""
    grammar = grammars.matcher(JSON, THINKING)
    (brace,) = bits(grammars.matcher(JSON, GREEDY).make_next_constraint([]).allowed[0])
    everything = [~(1 << EOS), *[-1] * (VOCABULARY // 32 - 1)]  # but for the answer's end
    window = grammar.make_next_constraint([50, END_OF_THOUGHT, 51])
    assert window.allowed[:2].tolist() == [everything] * 2
    assert bits(window.allowed[2]) == [brace]
    assert window.drafts == [50, END_OF_THOUGHT, brace], "what is certain replaces a bad draft"
    assert window.kept == 2
    closed = grammar.make_next_constraint([END_OF_THOUGHT, brace])
    assert closed.allowed[0].tolist() == everything
    assert closed.drafts[:2] == [END_OF_THOUGHT, brace]
    assert len(closed.drafts) == 3
    assert grammar.make_next_constraint([50, EOS]).drafts == [50, EOS], "it is not accepted"
    for token in (50, 51, END_OF_THOUGHT):
        grammar.take(token)
    assert grammar.make_next_constraint([]).drafts[0] == brace
    grammar.take(brace)
    with pytest.raises(RequestError, match="structured_outputs: "):
        grammar.take(brace)


def test_no_drafts_to_replace(backend: tokenizers.Tokenizer) -> None:
    """An engine of nextn 0 has one row, and nothing is forced ahead."""
    grammar = Grammars(manifest(nextn=0), Tokenizer(backend), ABLE).matcher(JSON, GREEDY)
    window = grammar.make_next_constraint([])
    assert (window.drafts, window.kept, window.allowed.shape) == ([], 0, (1, VOCABULARY // 32))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


WIDE = {"enum": [f"{i:x}" * 9 for i in range(6000)]}


@pytest.mark.parametrize(
    ("asked", "says"),
    [({"json": {"not": {"type": "string"}}}, 'Unimplemented keys: ["not"]'),
     ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
     ({"json": {"$ref": "https://example.org/x.json"}}, "structured_outputs: "),
     ({"json": "{no"}, "structured_outputs: "), ({"json": "7"}, "structured_outputs: "),
     ({"json": False}, "structured_outputs: "), ({"json": nested(400)}, "structured_outputs: "),
     ({"regex": "(?=a)b"}, "look-around"),
     ({"regex": "(((a{99}){99}){99}){99}"}, "structured_outputs: "),
     ({"grammar": "start: foo"}, 'unknown name: "foo"'),
     ({"grammar": "root ::= ("}, "structured_outputs: "),
     ({"grammar": "x" * 300_000}, "longer than 262144 characters"), ({"json": WIDE}, None),
     ({"json": {"$defs": CHAIN, "$ref": "#/$defs/d0"}}, None),
     ({"json": {"items": schema(10_000)}}, "10000 properties, at most 3000 are compiled"),
     ({"json": {"anyOf": [schema(1000)] * 10}}, "10000 properties, at most 3000"),
     ({"json": {"pattern": "(a?)" * 3000}}, "12000 characters of patterns, at most 8192"),
     ({"regex": "(a?)" * 50_000}, "200000 characters of patterns, at most 8192"),
     ({"grammar": "start: /" + "a?" * 9000 + "/"}, "characters of patterns, at most 8192"),
     ({"grammar": 'start: "a"' + ' "a"?' * 9000}, "characters of rules, at most 32768"),
     ({"grammar": "root ::= " + '"a" ' * 3000}, "characters of rules, at most 8192"),
     ({"grammar": f"start: %json {json.dumps(schema(5000))}"}, "5000 properties, at most 3000")],
)  # fmt: skip
def test_what_cant_be_followed(asked: dict[str, Any], says: str | None, grammars: Grammars) -> None:
    """One line with llguidance's reason, and soon."""
    began, output = time.process_time(), None
    try:
        grammars.matcher(StructuredOutputs(**asked), GREEDY).make_next_constraint([])
    except RequestError as error:
        output = str(error)
    assert (output is None) == (says is None)
    assert says is None or (says in str(output) and "\n" not in str(output))
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("asked", "says"),
    [({}, "give one of json, regex, choice, grammar, json_object, not 0"),
     ({"regex": "a", "json_object": True}, "not 2"), ({"json_object": False}, "not 0"),
     ({"regex": 7}, "regex must be a text"), ({"choice": []}, "choice must be a list of texts"),
     ({"choice": "ab"}, "choice must be a list of texts"),
     ({"choice": [1]}, "choice must be a list of texts"),
     ({"json": {"a": {1}}}, "json is no schema")],
)  # fmt: skip
def test_forms_that_are_none(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        StructuredOutputs(**asked)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"min_tokens": 1}, "min_tokens"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"acceptance": "rejection", "rejection_sample_method": "synthetic"}
         | {"synthetic_acceptance_length": 1.5}, "synthetic acceptance"),
    ],
)  # fmt: skip
def test_what_would_go_beyond_the_form(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=f"structured_outputs can't go with {says}"):
        SamplingParams(structured_outputs=JSON, **settings)
    with pytest.raises(RequestError, match="must be a StructuredOutputs"):
        SamplingParams(structured_outputs={"json": SCHEMA})  # type: ignore[arg-type]


def test_engines_that_cant(backend: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(backend)
    endless = manifest()
    model = endless.model.model_copy(update={"eos_token_ids": ()})
    endless = endless.model_copy(update={"model": model})
    for grammars, says in (
        (Grammars(manifest(), tokenizer, frozenset()), "this engine's steps take no grammar"),
        (Grammars(manifest(), None, ABLE), "built without a tokenizer"),
        (Grammars(endless, tokenizer, ABLE), "no token that ends an answer"),
    ):
        with pytest.raises(RequestError, match=says):
            grammars.matcher(JSON, GREEDY)


WITHOUT = """
import sys
sys.modules["llguidance"] = None
from mtpbuild.runtime import Engine, MtpbuildError, SamplingParams, StructuredOutputs
form = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
with Engine.load(sys.argv[1]) as engine:
    try:
        engine.generate("a", form)
    except MtpbuildError as error:
        print(error)
"""


@pytest.mark.xdist_group("tiny")  # which has the engine
def test_without_llguidance(tiny_engine: Callable[..., Path]) -> None:
    """An engine runs without it; a request that needs it says what to install."""
    run = [sys.executable, "-c", WITHOUT, str(tiny_engine(3))]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    needs = f"a request with structured_outputs needs llguidance: {advise_install('serve')}"
    assert done.stdout == needs + "\n"


def test_requests_share_a_compiled_grammar(grammars: Grammars) -> None:
    """Each has a matcher of its own."""
    first, second = (grammars.matcher(JSON, GREEDY) for _ in range(2))
    (brace,) = bits(first.make_next_constraint([]).allowed[0])
    first.take(brace)
    assert bits(second.make_next_constraint([]).allowed[0]) == [brace]
    assert bits(first.make_next_constraint([]).allowed[0]) != [brace]


def test_json_has_no_white_space(grammars: Grammars, backend: tokenizers.Tokenizer) -> None:
    grammar: GrammarMatcher = grammars.matcher(JSON, GREEDY)
    output: list[int] = []
    for _ in itertools.count():
        token = bits(grammar.make_next_constraint([]).allowed[0])[-1]
        if token == EOS:
            break
        output.append(token)
        grammar.take(token)
    text = backend.decode(output)
    assert text == json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "enum", "properties", "items", "$ref", "pattern", "anyOf", "a"]
            ),
            inner | st.sampled_from(["object", "string", "array", "#/a", "a+", "^(a|b)$"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)
WORDS = st.text(alphabet="start:= ()[]{}|\"'/ab\\+*?<>^$%\n\ud800é0", max_size=40)


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(kind=st.sampled_from(["json", "regex", "grammar", "choice"]), value=VALUES, text=WORDS)
def test_anything_is_followed_or_refused(
    kind: str, value: Any, text: str, grammars: Grammars
) -> None:
    asked = {"json": value, "choice": [text, text]}.get(kind, text)
    output, allowed = "", [0]
    try:
        matcher = grammars.matcher(StructuredOutputs(**{kind: asked}), GREEDY)
        window = matcher.make_next_constraint([7, 8])
        allowed = bits(window.allowed[0])
    except RequestError as error:
        output = str(error)
    assert "\n" not in output
    assert allowed, "a token is always allowed"


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    close_objects(copy := deepcopy(schema))
    return copy


def test_an_object_has_the_properties_that_are_listed() -> None:
    """Closed where that is said nowhere; never where properties come from several places."""
    inner = {"type": "object", "properties": {"properties": {"const": {"properties": {}}}}}
    schema = {"properties": {"a": {"items": inner}}, "$defs": {"b": {"anyOf": [inner]}}}
    shut = inner | {"additionalProperties": False}
    assert closed(schema) == {
        "properties": {"a": {"items": shut}},
        "$defs": {"b": {"anyOf": [shut]}},
        "additionalProperties": False,
    }
    listed: dict[str, Any] = {"properties": {"a": {}}}
    for other in (
        listed | {"additionalProperties": True},
        listed | {"additionalProperties": {"type": "string"}},
        listed | {"anyOf": [{"properties": {"b": {}}}]},
        {"allOf": [listed, {"properties": {"b": {}}}]}, {"type": "object"},
    ):  # fmt: skip
        assert closed(other) == other
