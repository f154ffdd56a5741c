"""Calls that templates write come back equal in all types, and what models slip is mended."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mtpbuild.builder.plan.recipe import find_shipped_template
from mtpbuild.runtime.errors import RequestError
from mtpbuild.runtime.text.chat_template import ChatTemplates, TemplateText
from mtpbuild.runtime.tool_calls.calls import ToolCallParser
from mtpbuild.runtime.tool_calls.detect import detect_form
from mtpbuild.runtime.tool_calls.forms import FORMS
from mtpbuild.runtime.tool_calls.json_reader import JsonReader
from tests.support.model_tokenizers import TEMPLATES
from tests.support.split_pieces import cut, fed, joined

# Chat templates that write calls, as published ones do: a file for each form, or another model's.
WRITTEN = TEMPLATES.with_name("call_templates")
LIKE = {"deepseek_v3": "deepseek", "glm45": "glm", "hermes": "qwen", "qwen3_coder": "qwen3_5"}
LIKE |= {"gemma4": "gemma4"}
UNKNOWN = [*sorted((WRITTEN / "unknown").iterdir()), TEMPLATES / "gigachat_like.jinja"]
ASKED = "what is asked"
MARKS = sorted(
    {mark for form in FORMS.values() for mark in form.tokens}
    | {
        "</parameter>",
        "<parameter=b>",
        "</function>",
        "<function=f>",
        '<invoke name="',
        "</invoke>",
    }
    | {"```", "```json\n", "\n", '"', "\\", "{", "}", "'", "12", "true", "None", "null", " ", "[1]"}
)
TEXTS = st.lists(st.sampled_from(MARKS) | st.text(max_size=3), max_size=6).map("".join)
VALUES: Any = {
    "string": TEXTS, "integer": st.integers(),
    "number": st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(), "null": st.none(),
    "array": st.lists(st.recursive(st.none() | TEXTS, st.lists, max_leaves=3), max_size=3),
    "object": st.dictionaries(TEXTS, st.none() | st.booleans() | TEXTS, max_size=3),
}  # fmt: skip


def template(path: Path) -> ChatTemplates:
    text = TemplateText("template", path.read_text(encoding="utf-8"))
    return ChatTemplates({"default": text}, {"bos_token": "<s>", "eos_token": "</s>"})


def template_of(form: str) -> ChatTemplates:
    """Return a template that writes calls in a form."""
    like = TEMPLATES / f"{LIKE.get(form)}_like.jinja"
    shipped = find_shipped_template(form)
    return template(shipped or (like if form in LIKE else WRITTEN / f"{form}.jinja"))


def found(form: str, text: str, tools: Any = None, parts: list[str] | None = None) -> Any:
    """Return what a whole answer says, and its closed calls with their arguments as objects."""
    parser = ToolCallParser(FORMS[form], tools or {})
    texts, calls = joined(fed(parser, parts or [text]))
    if parser.cut_named:
        with pytest.raises(json.JSONDecodeError):
            json.loads(calls.pop()[1])
        texts["content"] += parser.cut or ""
    return texts["content"], [(name, strict(arguments)) for name, arguments in calls]


def strict(text: str) -> dict[str, Any]:
    text.encode()

    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    value = json.loads(text, parse_constant=refuse)
    assert isinstance(value, dict)
    return value


def rendered(form: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Write calls as a model of that form does: what its template says after the question."""
    asked = {"role": "user", "content": ASKED}
    as_text: Any = functools.partial(json.dumps, ensure_ascii=False)
    for write in (lambda arguments: arguments, as_text):
        functions = [{"name": name, "arguments": write(arguments)} for name, arguments in calls]
        each = [
            {"id": f"functions.{function['name']}:{n}", "type": "function", "function": function}
            for n, function in enumerate(functions)
        ]
        answer = {"role": "assistant", "content": "", "tool_calls": each}
        try:
            text = template_of(form).render([asked, answer], add_generation_prompt=False)
        except RequestError:
            continue
        return text.rpartition(ASKED)[2]
    raise AssertionError("the template takes no calls")


def arguments_of(data: st.DataObject) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw the schema of a function, and arguments that fit it."""
    kinds = data.draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=4))
    names = [f"{kind}-{number}" for number, kind in enumerate(kinds)]
    properties = {name: {"type": kind} for name, kind in zip(names, kinds, strict=True)}
    arguments = {name: data.draw(VALUES[kind]) for name, kind in zip(names, kinds, strict=True)}
    return {"type": "object", "properties": properties}, arguments


def ends_inside(form: str, value: Any) -> bool:
    """Tell whether a value not in JSON holds what ends it, so that no reader can know better."""
    if (quote := FORMS[form].quote) and json.dumps(quote)[1:-1] in json.dumps(value):
        return True
    tags, text = FORMS[form].tags, value if isinstance(value, str) else json.dumps(value)
    if tags is None:
        return False
    marks = (tags.key, tags.end.strip(), tags.name[0].strip(), FORMS[form].end, FORMS[form].begin)
    follows = "|".join(re.escape(mark) for mark in marks if mark)
    line = f"{re.escape(tags.end.strip())}\n{re.escape(FORMS[form].end)}"
    close = re.escape(tags.value[1].strip())
    return bool(re.search(rf"{close}\s*({follows})|\n{line}", text))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_calls_come_back_as_the_template_wrote_them(form: str, data: st.DataObject) -> None:
    tools, calls = {}, []
    for name in data.draw(st.sampled_from([["f"], ["get_weather", "g-2"]])):
        tools[name], arguments = arguments_of(data)
        calls.append((name, arguments))
        assume(not any(ends_inside(form, value) for value in arguments.values()))
    text = rendered(form, calls)
    assert found(form, text, tools)[1] == calls
    assert found(form, text, tools, cut(text, data))[1] == calls


@settings(max_examples=300, deadline=None)
@given(data=st.data(), form=st.sampled_from(sorted(FORMS)))
def test_whatever_is_said_arguments_are_an_object(form: str, data: st.DataObject) -> None:
    """However it is cut, and whatever was damaged."""
    marks = [*FORMS[form].tokens, "<function=f>", '{"name": "f", "arguments": {', *MARKS]
    pieces = st.lists(st.sampled_from(marks) | st.text(max_size=3), max_size=14)
    text = FORMS[form].begin + "".join(data.draw(pieces))
    whole = found(form, text)
    assert found(form, text, None, cut(text, data)) == whole
    assert found(form, text, None, list(text)) == whole


@settings(max_examples=20, deadline=None)
@given(
    value=st.recursive(
        st.none() | TEXTS | st.integers(), lambda s: st.lists(s) | st.dictionaries(TEXTS, s)
    ),
    indent=st.sampled_from([None, 2]),
    data=st.data(),
)
def test_json_stays_as_it_is(value: Any, indent: int | None, data: st.DataObject) -> None:
    text = json.dumps({"a": value}, indent=indent, ensure_ascii=False)
    assume(not any("\ud800" <= c <= "\udfff" for c in text))
    reader, output, held = JsonReader(), "", ""
    for part in cut(text, data):
        count, more = reader.take(held + part)
        output, held = output + more, (held + part)[count:]
    assert (output, held, reader.closed) == (text, "", True)


@pytest.mark.parametrize("form", FORMS)
def test_the_form_is_what_the_template_writes(form: str) -> None:
    assert detect_form(template_of(form)) == form


@pytest.mark.parametrize("path", UNKNOWN, ids=lambda path: path.stem)
def test_a_form_that_is_not_known_is_not_taken_for_another(path: Path) -> None:
    assert detect_form(template(path)) is None


F = ("f", {"a": 1})
OPEN, CLOSE = "<tool_call>\n", "\n</tool_call>"


def hermes(*calls: str) -> str:
    return "\n".join(OPEN + call + CLOSE for call in calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (OPEN + '{"name": "f", "arguments": {"a": 1}}\n' + hermes('{"name": "g"}'), "",
         [F, ("g", {})]),
        ("So <tool_call>: " + hermes('{"name": "f", "arguments": {"a": 1}}'), "So <tool_call>: ",
         [F]),
        (hermes('{"arguments": {"a": 1}, "name": "f"}'), "", [F]),
        (hermes('{"id": "x", "name": "f", "parameters": {"a": 1}}'), "", [F]),
        (hermes('{"name": "f", "arguments": {"a": 1}, "id": "</tool_call>"}'), "", [F]),
        (hermes('{"arguments": {"a": "x </tool_call>"}, "name": "f"}'), "",
         [("f", {"a": "x </tool_call>"})]),
        (hermes('{"name": "f", "arguments": "{\\"a\\": 1}"}'), "", [F]),
        (hermes('{"name": "f", "arguments": null}', '{"name": "f", "arguments": ""}'), "",
         [("f", {})] * 2),
        (hermes('{"name": "f", "arguments": {"a": 1}}', '{"name": " ", "arguments": {}}'),
         "\n" + hermes('{"name": " ", "arguments": {}}'), [F]),
        (hermes('{"name": "f", "arguments": [1]}'), hermes('{"name": "f", "arguments": [1]}'), []),
        (hermes('{"name": "f", "arguments": "no"}'), hermes('{"name": "f", "arguments": "no"}'),
         []),
        (hermes('{"name": "a\\qb\n", "arguments": {}}'), "", [("a\\qb", {})]),
        (hermes('{"name": "f", "arguments": {"a": NaN, "b": 1e400, "c": -Infinity}}'), "",
         [("f", dict.fromkeys("abc"))]),
        (hermes('{"name": "f", "arguments": {"a": "line\nline\t"}}'), "",
         [("f", {"a": "line\nline\t"})]),
        (hermes('{"name": "f", "arguments": {"a": "\\ud800 \\ud83d\\ude00"}}'), "",
         [("f", {"a": "\ufffd 😀"})]),
        (hermes('[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]'), "", [F, ("g", {})]),
        (hermes('{"type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}'), "",
         [F]),
        (hermes('```json\n{"name": "f", "arguments": {"a": 1}}\n```'), "", [F]),
        (hermes('{"name": "f", "arguments": {"a": 1}}}'), "", [F]),
        (hermes('{"name": "f", "arguments": {"a": 1}'), "", [F]),
        (hermes("{'name': 'f', 'arguments': {'a': 1,}}"), "", [F]),
        (OPEN + '{"name": "f", "arguments": {"a": 1}}\nThat is all.', "That is all.", [F]),
        (OPEN + '{"name": "f", "arguments": {"a": "x', OPEN + '{"name": "f", "arguments": {"a": "x',
         []),
        (OPEN + '{"name": "f", "arguments": {"a": 1}', "", [F]),
        (OPEN + '{"name": "f", "arguments": {"a": 1}}\n</tool_ca', "", [F]),
        ("So" + OPEN + '{"name": "f", "arguments": {"a": "', "So", []),
        ("So" + OPEN + "{'arguments': {'a': '" + hermes('{"name": "g"}'), "So", []),
        ("So" + OPEN + '{"na', "So", []),
        ("So" + OPEN + "```js", "So", []),
        ("So" + OPEN, "So", []),
        (hermes('{"name": "f", "arguments": {"a": 1}}') + OPEN + '[{"name": "g"}, {"na', "", [F]),
        (OPEN + '{"arguments": {"a": 1}, "na', OPEN + '{"arguments": {"a": 1}, "na', []),
    ],
)  # fmt: skip
def test_what_models_write_as_hermes_calls(text: str, content: str, calls: Any) -> None:
    whole, chars = found("hermes", text), found("hermes", text, None, list(text))
    assert whole == chars
    assert calls is None or whole == (content, calls)


DSML = "<｜DSML｜tool_calls>\n"
INVOKE = '<｜DSML｜invoke name="f">\n'
ONE = '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
CLOSED = "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
V31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
END = "<｜tool▁call▁end｜>"


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("deepseek_v3", V3 + '{"a": 1}\n``', "", [F]),
        ("deepseek_v3", V3 + '{"a": 1}\n```' + V3 + '{"a": 1}```' + END, "", [F, F]),
        ("deepseek_v3", V3 + '{"a": "```\n```json"}\n```' + END, "",
         [("f", {"a": "```\n```json"})]),
        ("deepseek_v3", V3 + "null\n```" + END, "", [("f", {})]),
        ("deepseek_v3", V3 + '"{\\"a\\": 1}"\n```' + END, "", [F]),
        ("deepseek_v3", V3 + "no\n```" + END + "so", V3 + "no\n```" + END + "so", []),
        ("deepseek_v31", V31 + '{"a": 1}' + V31 + '{"a": 1}<｜tool▁calls▁end｜>', "", [F, F]),
        ("deepseek_v3", "So" + V3 + "``", "So", []),
        ("deepseek_v3", "So" + V3 + "null", "So", [("f", {})]),
        ("deepseek_v31", V31 + END, "", [("f", {})]),
        ("glm45", OPEN + "f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>" + CLOSE, "",
         [("f", {"a": "1"})]),
        ("glm45", "So " + OPEN + "f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>", "So ", []),
        ("glm45", "So <tool_call> is a mark", "So <tool_call> is a mark", []),
        ("deepseek_v31", V31, V31.removeprefix("<｜tool▁calls▁begin｜>"), []),
        ("deepseek_v4", "So\n\n" + DSML + INVOKE + ONE + CLOSED, "So", [F]),
        ("deepseek_v4", "\n\n" + DSML + INVOKE + "\n" + CLOSED, "", [("f", {})]),
        ("deepseek_v4", "So\n\n" + INVOKE + ONE + CLOSED, "So\n\n", [F]),
        ("deepseek_v4", "So\n\n" + DSML + INVOKE + ONE + "</｜DSML｜inv", "So", []),
        ("deepseek_v4", "So\n\n" + DSML + INVOKE + ONE.removesuffix("</｜DSML｜parameter>\n"), "So",
         []),
        ("deepseek_v4", "So\n\n" + DSML + "are marks", "So\n\n" + DSML + "are marks", []),
        ("deepseek_v4", DSML + INVOKE + ONE + CLOSED + "\n\n" + DSML + INVOKE + ONE + CLOSED, "",
         [F, F]),
        ("kimi_k2", "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>", "",
         [("f", {})]),
    ],
)  # fmt: skip
def test_damaged_calls_of_other_forms(form: str, text: str, content: str, calls: Any) -> None:
    assert found(form, text) == found(form, text, None, list(text)) == (content, calls)


SCHEMA = {
    "properties": {
        "s": {"type": "string"},
        "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "nullable": {"type": ["string", "null"]},
        "ref": {"$ref": "#/$defs/Text"},
        "object": {"$ref": "#/$defs/Object"},
        "all": {"allOf": [{"type": "string"}]},
        "enum": {"enum": ["1", "2"]},
        "mixed": {"enum": [1, True, "a"]},
        "const": {"const": "5"},
        "maybe": {"oneOf": [{"type": "integer"}, {"type": "null"}]},
        "flag": {"type": "boolean"},
        "n": {"type": "number"},
        "paths": {"type": ["string", "array"]},
        "loop": {"$ref": "#/$defs/Loop"},
        "odd": {"type": 5},
        "none": None,
    },
    "$defs": {
        "Text": {"$ref": "#/$defs/More"},
        "More": {"type": "string"},
        "Object": {"type": "object"},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "string"}]},
    },
}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [*((name, "12345", "12345") for name in ("s", "optional", "nullable", "ref", "all")),
     ("s", "null", "null"), ("all", "None", "None"), ("optional", "true", "true"),
     ("optional", "None", None), ("nullable", "null", None), ("object", '{"a": 1}', {"a": 1}),
     ("object", "{'a': None}", {"a": None}), ("enum", "1", "1"), ("mixed", "1", 1),
     ("mixed", "True", True), ("const", "5", "5"), ("maybe", "None", None), ("maybe", "7", 7),
     ("flag", "True", True), ("flag", "False", False), ("flag", "true", True), ("n", "NaN", "NaN"),
     ("n", "1e400", "1e400"), ("n", "1.5", 1.5), ("paths", '["a"]', ["a"]), ("paths", "[a", "[a"),
     ("odd", "1", 1), ("none", "x", "x"), ("loop", "x", "x")],
)  # fmt: skip
@pytest.mark.parametrize("form", ["glm45", "qwen3_coder", "minimax_m2"])
def test_tagged_arguments_have_the_types_of_their_schema(
    form: str, name: str, text: str, value: Any
) -> None:
    call = rendered(form, [("f", {name: text})])
    ((_, arguments),) = found(form, call, {"f": SCHEMA})[1]
    assert arguments == {name: value}
    assert type(arguments[name]) is type(value)


def qwen(*functions: str) -> str:
    return OPEN + "\n".join(functions) + CLOSE


def function(name: str, **arguments: str) -> str:
    tags = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<function={name}>\n{tags}</function>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (qwen(function("f", n="1"), function("g", flag="True")), "",
         [("f", {"n": 1}), ("g", {"flag": True})]),
        (qwen(function("f", s="re.sub('<parameter=n>x</parameter>', y)")), "",
         [("f", {"s": "re.sub('<parameter=n>x</parameter>', y)"})]),
        (qwen(function("f", s="</tool_call></function> <tool_call>")), "",
         [("f", {"s": "</tool_call></function> <tool_call>"})]),
        (OPEN + "<function=f>\n<parameter=s>\nabc\n<parameter=n>\n5\n</parameter>\n</function>"
         + CLOSE, "", [("f", {"s": "abc", "n": 5})]),
        (OPEN + "<function=f>\n<parameter=s>\nabc\n</function>" + CLOSE + qwen(function("g")), "",
         [("f", {"s": "abc"}), ("g", {})]),
        (function("f", n="5") + " so", "so", [("f", {"n": 5})]),
        (function("f", n="5") + CLOSE, "", [("f", {"n": 5})]),
        (qwen(function("f")) + OPEN + "<function=g>\n<parameter=s>\ncu", "", [("f", {})]),
        (OPEN + function("f", n="5") + "\n</tool_c", "", [("f", {"n": 5})]),
        ("So " + function("f", n="5").removesuffix("ion>"), "So ", []),
        ("So " + function("f", n="5").removesuffix("</function>"), "So ", []),
        ("So " + function("f", s="'</parameter></function> </tool_call> as' ") [:-20], "So ", []),
        ("So " + OPEN + "<function=f>\n<parameter=s>\n" + qwen("<function=g></function>") + " a",
         "So ", []),
        ("So " + OPEN + "<func", "So ", []),
        (OPEN + "<function=f>\n<parameter=s>\nabc</parameter></function>" + CLOSE, "",
         [("f", {"s": "abc"})]),
        (qwen("weather"), qwen("weather"), []),
        ("Write <function=name> and <tool_call>, so.", "Write <function=name> and <tool_call>, so.",
         []),
    ],
)  # fmt: skip
def test_what_models_write_as_tagged_calls(text: str, content: str, calls: Any) -> None:
    tools = {"f": SCHEMA, "g": SCHEMA}
    whole = found("qwen3_coder", text, tools)
    assert whole == found("qwen3_coder", text, tools, list(text)) == (content, calls)


@pytest.mark.parametrize("form", FORMS)
def test_only_the_first_call_where_only_one_is_wanted(form: str) -> None:
    calls = [("f", {"a": "x"}), ("g", {"a": "y"})]
    text = "I look." + rendered(form, calls).removeprefix("<assistant>") + " Done."
    feed = functools.partial(ToolCallParser, FORMS[form], single=True)
    for parts in ([text], list(text)):
        texts, given_calls = joined(fed(feed(), parts))
        assert [(name, json.loads(a)) for name, a in given_calls] == calls[:1]
        assert texts["content"].startswith("I look.")
        assert "Done" not in texts["content"]
