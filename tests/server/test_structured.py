"""Structured output of deepseek-tiny: what requests with a grammar say, alone and beside others."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jsonschema_rs
import numpy as np
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from mtpbuild.runtime import Engine, RequestError, SamplingParams, StructuredOutputs
from mtpbuild.runtime.contract.controls import StepControls
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.contract.programs import Constraint
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.programs.host_slots import HostSlots, PackedCaches
from mtpbuild.runtime.programs.onnxruntime import OnnxPrograms
from mtpbuild.runtime.server.options import ServerOptions
from mtpbuild.runtime.text.tokenizer import load_tokenizer
from mtpbuild.runtime.tool_calls.forms import FORMS
from tests.support.invoke import invoke
from tests.support.live_server import live

pytestmark = pytest.mark.xdist_group("tiny")
MODEL = "deepseek-tiny"
SUM: Any = [{"role": "user", "content": "What is 47 + 85?"}]
CHAT: Any = {"model": MODEL, "messages": SUM}
CODE, TEXT = "def f(", "The dog"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}
FORM = StructuredOutputs(json=SCHEMA)
GREEDY = SamplingParams(max_tokens=200, structured_outputs=FORM)
HOT = replace(GREEDY, temperature=1.0)
STRICT = [GREEDY, *(replace(HOT, seed=seed) for seed in range(3))]
REJECTION = replace(HOT, acceptance="rejection", seed=1)
BLOCK = replace(REJECTION, rejection_sample_method="block")


@pytest.fixture(scope="module")
def folder(tiny_engine: Callable[..., Path]) -> Path:
    return tiny_engine(3)


@contextlib.contextmanager
def asking(engine: Engine, parser: str) -> Iterator[openai.OpenAI]:
    """Yield a client of a server that writes tool calls in a form."""
    with live(engine, ServerOptions(tool_call_parser=parser)) as server, server.openai() as made:
        yield made


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    with asking(engine, "hermes") as made:
        yield made


def fits(text: str, schema: Any = SCHEMA) -> bool:
    return jsonschema_rs.is_valid(schema, json.loads(text))


@pytest.mark.full
def test_the_text_is_that_of_the_engine_without_drafts(
    engine: Engine, tiny_engine: Callable[..., Path]
) -> None:
    """Greedy and sampled, behind a thought too; some of it was certain before it was judged."""
    prompts: list[Any] = [CODE, TEXT, engine.chat_ids(SUM)]
    with Engine.load(tiny_engine(0), threads=1) as plain:
        wanted = [plain.generate(prompt, params) for prompt in prompts for params in STRICT]
    got = [engine.generate(prompt, params) for prompt in prompts for params in STRICT]
    for one, other in zip(got, wanted, strict=True):
        assert one.token_ids == other.token_ids
        assert one.finish_reason == "stop"
        assert fits(one.text.rpartition("</think>")[2])
        assert one.metrics.forced_tokens > 10
        assert other.metrics.forced_tokens == 0
    assert all("</think>{" in result.text for result in got[-len(STRICT) :])
    assert "132" in got[-len(STRICT)].text.partition("</think>")[0], "thoughts are free"


@pytest.mark.parametrize("params", [REJECTION, BLOCK], ids=["rejection", "block"])
def test_other_rules_keep_to_the_form(params: SamplingParams, engine: Engine) -> None:
    for result in engine.generate([CODE] * 6, [replace(params, seed=s) for s in range(6)]):
        assert fits(result.text)
        assert result.metrics.forced_tokens > 10


def schemas(rng: np.random.Generator, depth: int) -> Any:
    """Return a schema whose texts are short."""
    kind = int(rng.integers(8 if depth else 5))
    if kind == 5:
        return {"anyOf": [schemas(rng, depth - 1) for _ in range(2)]}
    if kind == 6:
        return {"type": "array", "items": schemas(rng, depth - 1), "maxItems": 3}
    if kind == 7 or depth == 3:
        names = [f"{rng.choice(['a', 'long name', 'ключ', 'x_y'])}{i}" for i in range(3)]
        some = [name for name in names if rng.random() < 0.6]
        properties = {name: schemas(rng, depth - 1) for name in names}
        return {
            "type": "object", "properties": properties, "required": some,
            "additionalProperties": False,
        }  # fmt: skip
    return [
        {"type": "boolean"},
        {"type": "integer", "minimum": -20, "maximum": int(rng.integers(1, 2000))},
        {"type": "string", "maxLength": int(rng.integers(1, 9))},
        {"enum": ["red", "dark red", 7, None]},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"},
    ][kind]


def test_what_ends_fits_its_schema(engine: Engine) -> None:
    """Random schemas and seeds at temperature 1; free requests beside them keep their tokens."""
    rng = np.random.default_rng(3)
    asked = [schemas(rng, 3) for _ in range(21)]
    free = SamplingParams(max_tokens=40, temperature=1.0, seed=7)
    alone = engine.generate(TEXT, free).token_ids
    rules = [{}, {"acceptance": "rejection"}, {"draft_sample_method": "greedy"}]
    params = [
        replace(HOT, seed=i, structured_outputs=StructuredOutputs(json=schema), **rules[i % 3])  # type: ignore[arg-type]
        for i, schema in enumerate(asked)
    ]
    each = [p for pair in zip(params, [free] * len(params), strict=True) for p in pair]
    results = engine.generate([TEXT] * len(each), each)
    for schema, result in zip(asked, results[::2], strict=True):
        assert result.finish_reason == "stop"
        assert fits(result.text, schema), (schema, result.text)
    assert {tuple(result.token_ids) for result in results[1::2]} == {tuple(alone)}
    strict = [i for i in range(len(params)) if i % 3 != 1][:8]
    for i in strict:
        assert results[2 * i].token_ids == engine.generate(TEXT, params[i]).token_ids


def test_slots_are_free_of_the_last_grammar(engine: Engine) -> None:
    """They are free after a request was cancelled in mid-answer, and after one has ended."""
    free = SamplingParams(max_tokens=30)
    wanted = engine.generate(CODE, free).token_ids
    with engine.stream(CODE, GREEDY) as stream:
        next(stream)
        stream.cancel()
    assert engine.generate(CODE, free).token_ids == wanted
    first = engine.generate(CODE, GREEDY)
    assert engine.generate(CODE, free).token_ids == wanted
    assert engine.generate(CODE, GREEDY).token_ids == first.token_ids


def test_other_forms(engine: Engine) -> None:
    def say(**form: Any) -> str:
        settings = replace(HOT, seed=4, structured_outputs=StructuredOutputs(**form))
        return engine.generate(CODE, settings).text

    assert say(choice=["yes", "no"]) in ("yes", "no")
    head, _, tail = say(regex="[a-f]{3,5}-[0-9]{2}").partition("-")
    assert 3 <= len(head) <= 5
    assert tail.isdigit()
    assert say(grammar='start: "def " /[a-z]{1,5}/ "():"').endswith("():")
    assert say(grammar='root ::= "x" ("+" [0-9]){2}').count("+") == 2


class Spoiling(OnnxPrograms):
    """Programs whose constraints go through `spoil` on their way."""

    spoil: Callable[[Constraint], Constraint]

    def constrain(self, slot: int, constraint: Constraint) -> None:
        super().constrain(slot, self.spoil(constraint))


def first_mask(constraint: Constraint) -> Constraint:
    masks = np.repeat(constraint.allowed[:1], len(constraint.allowed), axis=0)
    return replace(constraint, allowed=masks)


def free_rows(constraint: Constraint) -> Constraint:
    allowed = constraint.allowed.copy()
    allowed[1:] = -1
    return replace(constraint, allowed=allowed)


@pytest.mark.parametrize("bug", [first_mask, free_rows])
def test_planted_bugs_break_the_form(
    bug: Callable[[Constraint], Constraint], folder: Path, engine: Engine
) -> None:
    """A token that the grammar does not take ends its request with an error, and no other one."""
    manifest = read_manifest(folder)
    programs = Spoiling(folder, manifest, PackedCaches(manifest.state), 1)
    programs.spoil = bug
    free = SamplingParams(max_tokens=20)
    with Engine(programs, manifest, load_tokenizer(folder, manifest)) as spoilt:
        with pytest.raises(RequestError, match="structured_outputs: "):
            spoilt.generate(CODE, GREEDY)
        assert spoilt.generate(CODE, free).token_ids == engine.generate(CODE, free).token_ids


def test_a_certain_draft_has_all_the_probability(folder: Path) -> None:
    """What a slot held before is overwritten: rejection asks what a draft was drawn from."""
    programs: Any = load_programs(folder, read_manifest(folder), threads=1)
    programs.state["draft_probs"][:] = 0.5
    programs.state["window"][1] = [9, 20, 21, 22]
    programs.state["num_drafts"][1] = 2
    assert programs.drafts(1) == [20, 21]
    words = np.full((4, 64), 7, np.int32)
    programs.constrain(1, Constraint([20, 30, 31], 1, words))
    assert programs.drafts(1) == [20, 30, 31]
    assert programs.state["window"][1].tolist() == [9, 20, 30, 31]
    probs = programs.state["draft_probs"]
    assert (probs[1, 0] == 0.5).all()
    assert [np.flatnonzero(row).tolist() for row in probs[1, 1:]] == [[30], [31]]
    assert (probs[1, 1:].sum(-1) == 1).all()
    assert (probs[[0, 2, 3]] == 0.5).all()


class Animal(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=8)
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=99)
    owner: str | None = Field(max_length=8)


def test_parse(client: Any) -> None:
    for temperature in (0.0, 1.0):
        asked = CHAT | {"temperature": temperature, "seed": 1}
        answer = client.chat.completions.parse(**asked, response_format=Animal)
        (choice,) = answer.choices
        assert isinstance(choice.message.parsed, Animal)
        assert choice.message.model_extra["reasoning"], "it has thought before"
        assert answer.model_extra["metrics"]["forced_tokens"] > 0


def test_a_schema_of_pydantic_ends(client: Any) -> None:
    """It leaves open whether there are other properties, which this model would go on inventing."""

    class Open(BaseModel):
        left: int = Field(ge=0, le=999)
        right: int = Field(ge=0, le=999)

    schema = Open.model_json_schema()
    assert "additionalProperties" not in schema
    form: Any = {"type": "json_schema", "json_schema": {"name": "open", "schema": schema}}
    for seed in range(3):
        asked = CHAT | {"response_format": form, "seed": seed, "max_tokens": 400}
        answer = client.chat.completions.create(**asked)
        (choice,) = answer.choices
        assert choice.finish_reason == "stop"
        assert Open.model_validate_json(choice.message.content or "").model_extra is None


def test_a_stream_says_the_same(client: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    asked = CHAT | {"temperature": 0, "response_format": form}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    events = client.chat.completions.create(**asked, stream=True)
    told = [event.choices[0].delta.content or "" for event in events if event.choices]
    assert "".join(told) == whole
    assert fits(whole)


@pytest.mark.parametrize(
    ("form", "matches"),
    [({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
     ({"regex": "[0-9]{3}"}, str.isdigit), ({"json": SCHEMA}, fits),
     ({"json": json.dumps(SCHEMA)}, fits),
     ({"grammar": 'start: "a" "b"+'}, lambda text: text.startswith("ab"))],
)  # fmt: skip
def test_vllms_names(form: dict[str, Any], matches: Callable[[str], bool], client: Any) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=CODE, max_tokens=100, seed=1, extra_body={"structured_outputs": form}
    )
    assert matches(answer.choices[0].text)


WEATHER: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now_here"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
SOME = ("deepseek_v3", "qwen3_coder")  # JSON, and tagged text
TEXTUAL: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "string"}}}
]


@pytest.mark.parametrize(
    "parser",
    [form if form in SOME else pytest.param(form, marks=pytest.mark.full) for form in FORMS],
)
def test_forced_calls(parser: str, engine: Engine) -> None:
    schemas = {"weather": WEATHER, "now_here": {"const": {}}}
    choices: list[tuple[Any, int]] = [(NAMED, 1), ("required", 2), ("required", 3)]
    with asking(engine, parser) as client:
        for choice, seed in choices:
            asked = CHAT | {"tools": TOOLS, "tool_choice": choice, "seed": seed}
            answer = client.chat.completions.create(**asked, parallel_tool_calls=False)
            (output,) = answer.choices
            (call,) = output.message.tool_calls
            assert call.type == "function"
            assert output.finish_reason == "tool_calls"
            assert not output.message.content
            assert fits(call.function.arguments, schemas[call.function.name])
            assert choice == "required" or call.function.name == "weather"


@pytest.mark.parametrize(
    "form",
    [{"response_format": {"type": "json_object"}}, {"tools": TOOLS, "tool_choice": "required"}],
    ids=["form", "forced call"],
)
def test_an_answer_does_not_end_in_its_thought(form: dict[str, Any], client: Any) -> None:
    """Deepseek-tiny would end there in a third of its answers; it may only be cut."""
    hi: Any = [{"role": "user", "content": "hi"}]
    asked = {"model": MODEL, "messages": hi, "temperature": 0.8, "seed": 0, "extra_body": form}
    for choice in client.chat.completions.create(**asked, n=6, max_tokens=200).choices:
        message = choice.message
        assert choice.finish_reason == "length" or message.content or message.tool_calls
    (cut,) = client.chat.completions.create(**asked, max_tokens=3).choices
    assert (cut.finish_reason, cut.message.content) == ("length", None)
    assert cut.message.model_extra["reasoning_content"]


@pytest.mark.parametrize(("limit", "reason"), [({"max_tokens": 24}, "length"), ({}, "stop")])
def test_a_forced_call_that_is_cut_is_nothing(
    limit: dict[str, Any], reason: str, client: Any
) -> None:
    asked: Any = {"model": MODEL, "messages": PREFILL, "tools": TOOLS, "tool_choice": NAMED}
    asked |= {"stop": "city", "temperature": 0} if reason == "stop" else limit
    (choice,) = client.chat.completions.create(**asked, extra_body=ON).choices
    assert (choice.message.content, choice.message.tool_calls) == (None, None)
    assert choice.finish_reason == reason


@pytest.mark.parametrize(
    ("body", "says", "param"),
    [
        ({"response_format": {"type": "xml"}}, "must be text, json_object", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "must be a JSON sch", "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"not": {}}},
                }
            },
            'response_format: Unimplemented keys: ["not"]', "response_format",
        ),
        ({"structured_outputs": {"regex": "(?=a)"}}, "look-around", "structured_outputs"),
        ({"structured_outputs": {"regex": r"a[^\s\S]"}}, "no answer satis",
         "structured_outputs"),
        ({"structured_outputs": {"grammar": 'start: /[a-z]/ A\nA: /a+/ & /b+/'}},
         "no answer satis", "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "not 2", "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "not supp", "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
         "can't go with structured_outputs", "response_format"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_t", "structured_outputs"),
        ({"tool_choice": "required"}, "tool_choice needs tools", "tool_choice"),
        ({"tool_choice": "some", "tools": TOOLS}, "tool_choice must be", "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": TOOLS},
         "no tool 'g'", "tool_choice"),
        ({"tool_choice": NAMED, "tools": TEXTUAL}, "must be of type object", "tools"),
        ({"tool_choice": NAMED, "tools": TOOLS, "response_format": {"type": "json_object"}},
         "can't go with a forced tool call", "response_format"),
    ],
)  # fmt: skip
def test_refusals(body: dict[str, Any], says: str, param: str, client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="400") as refused:
        client.chat.completions.create(**CHAT, extra_body=body)
    assert says in str(refused.value)
    assert refused.value.param == param
    assert isinstance(refused.value.body, dict)
    assert "\n" not in refused.value.body["message"]


PREFILL: Any = [
    {"role": "user", "content": "What is the <think> tag? <｜Assistant｜><think>"},
    {"role": "assistant", "content": "Here: "},
]
ON: Any = {"continue_final_message": True}
FLAG: Any = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
MARKED = ["<think>", "a <think> b", "x<｜User｜>", "x<｜end▁of▁sentence｜>y", "</think>"]


def test_a_users_think_opens_no_thought(client: Any, engine: Engine) -> None:
    form = {"structured_outputs": {"json": FLAG}}
    asked: Any = {"model": MODEL, "temperature": 0, "max_tokens": 30}
    for prompt in ("Explain <think> tags: ", "Explain <think>"):
        output = client.completions.create(**asked, prompt=prompt, extra_body=form)
        assert output.choices[0].text == '{"a":false}'
    for more in (form, {}):
        (choice,) = client.chat.completions.create(
            **asked, messages=PREFILL, extra_body=ON | more
        ).choices
        assert choice.message.content
        assert not more or choice.message.content == '{"a":false}'
        assert choice.message.model_extra is None or "reasoning" not in choice.message.model_extra
    told = engine.chat(PREFILL, SamplingParams(max_tokens=12), **ON)
    assert told.content
    assert not told.reasoning_content


@pytest.mark.parametrize("text", MARKED)
def test_a_form_with_the_text_of_a_mark(text: str, client: Any, engine: Engine) -> None:
    """It is said by ordinary tokens, and is content."""
    asked: Any = {"model": MODEL, "temperature": 0, "max_tokens": 60}
    schema = {"type": "object", "properties": {text: {"enum": [text]}}, "required": [text]}
    forms: list[tuple[dict[str, Any], str]] = [
        ({"choice": [text]}, text),
        ({"json": schema}, json.dumps({text: text}, ensure_ascii=False, separators=(",", ":"))),
        ({"regex": f"{text}!"}, f"{text}!"),
        ({"grammar": f"start: {json.dumps(text)}"}, text),
    ]
    for form, wanted in forms:
        extra = {"structured_outputs": form}
        (output,) = client.completions.create(**asked, prompt="x", extra_body=extra).choices
        assert (output.text, output.finish_reason) == (wanted, "stop")
        (told,) = client.chat.completions.create(
            **asked, messages=PREFILL, extra_body=extra | ON
        ).choices
        assert (told.message.content, told.finish_reason) == (wanted, "stop")
    thought = engine.chat(SUM, replace(HOT, seed=1, structured_outputs=only(text)))
    assert (thought.content, bool(thought.reasoning_content)) == (text, True)


def only(text: str) -> StructuredOutputs:
    return StructuredOutputs(choice=[text])


def test_forced_arguments_are_an_object(client: Any) -> None:
    """Whatever the tool's parameters leave open; a name with a mark's text is that text."""
    open_ones: list[Any] = [
        {},
        True,
        {"properties": {"a": {"minimum": 2**53}}, "required": ["a", "<think>"]},
        {"type": ["object", "null"], "properties": {"a": {"type": "boolean"}}},
    ]
    for parameters in open_ones:
        tool = {"type": "function", "function": {"name": "f-think", "parameters": parameters}}
        asked = {"model": MODEL, "messages": PREFILL, "tools": [tool], "tool_choice": "required"}
        drawn = {"n": 4, "seed": 5, "temperature": 1.2, "max_tokens": 120}
        extra = ON | {"parallel_tool_calls": False}
        answer = client.chat.completions.create(**asked, **drawn, extra_body=extra)
        done = [choice for choice in answer.choices if choice.finish_reason != "length"]
        for choice in done:
            (call,) = choice.message.tool_calls or []
            assert call.type == "function"
            assert call.function.name == "f-think"
            found = json.loads(call.function.arguments)
            assert isinstance(found, dict)
            assert parameters is True or fits(call.function.arguments, parameters)
        assert done


def test_the_command_line(folder: Path, tmp_path: Path, engine: Engine) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA), encoding="utf-8")
    run: list[str | Path] = ["run", "--engine", folder, "--threads", "1", "--json-schema"]
    code, out, _ = invoke(*run, schema, "--prompt", CODE)
    assert code == 0
    assert out.strip() == engine.generate(CODE, GREEDY).text
    code, out, _ = invoke(*run, schema, "--prompt", CODE, "--json")
    told = json.loads(out)
    assert told["metrics"]["forced_tokens"] > 10
    schema.write_text('{"not": {}}', encoding="utf-8")
    code, out, err = invoke(*run, schema, "--prompt", CODE)
    assert (code, out) == (2, "")
    assert err.strip().endswith('error: structured_outputs: Unimplemented keys: ["not"]')
    schema.write_text("{", encoding="utf-8")
    code, _, err = invoke(*run, schema, "--prompt", CODE)
    assert code == 2
    assert f"--json-schema {schema} is not JSON" in err
    code, _, err = invoke(*run, tmp_path / "none.json", "--prompt", CODE)
    assert code == 2
    assert "can't be read" in err


def test_engines_without_masks_go_on(folder: Path) -> None:
    """Steps without inputs for masks run, and say that they take no grammar."""
    manifest = read_manifest(folder)
    mixed = manifest.programs["decode_mixed"]
    inputs = tuple(t for t in mixed.inputs if t.name not in ("constrained", "allowed"))
    assert len(inputs) == len(mixed.inputs) - 2
    without = mixed.model_copy(update={"inputs": inputs})
    lacking = manifest.model_copy(
        update={"programs": manifest.programs | {"decode_mixed": without}}
    )
    slots, whole = (HostSlots(m, PackedCaches(m.state), copies=2) for m in (lacking, manifest))
    assert whole.features - slots.features == {Feature.CONSTRAIN}
    for each in (slots, whole):
        each.begin(1, 5, 7, StepControls(temperature=1.0))
        each.move(1, 0)
        assert each.state["lengths"].tolist() == [5, 5, 0, 0]
