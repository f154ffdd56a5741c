"""Thoughts and tool calls are told from what is said, however the text is cut."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpbuild.runtime.server.tools import FORMS, ToolCalls
from mtpbuild.runtime.text.detokenizer import Span
from mtpbuild.runtime.text.reasoning import AnswerPiece, ThinkingSplitter
from tests.support.split_pieces import cut, fed, joined

V3 = (
    "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    '```json\n{"city": "Ulm"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>'
    "time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
V31 = (
    "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Ulm"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>"
)
HERMES = (
    'I look.<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n'
    '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
)
QWEN = (
    "I look.<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>"
)
TEXTS = {"deepseek_v3": V3, "deepseek_v31": V31, "hermes": HERMES, "qwen3_coder": QWEN}
ODD = (
    "no call, 1 < 2 <tool", "<tool_call>not JSON</tool_call> after", '<tool_call>{"name": "f"',
    '<tool_call>{"arguments": {"x": "</tool_call>"}, "name": "f"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": "</tool_call> {\\"", "y": [1, {}]}}</tool_call>  ',
    '  <tool_call>{"name": "f", "arguments": null}</tool_call> said  behind  ',
    '<tool_call>{"name": "f"}</tool_call>',
)  # fmt: skip


@pytest.mark.parametrize("form", TEXTS)
def test_calls(form: str) -> None:
    texts, calls = joined(fed(ToolCalls(FORMS[form]), [TEXTS[form]]))
    assert texts["content"] == "I look."
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("weather", {"city": "Ulm"}),
        ("time", {}),
    ]


@settings(max_examples=300, deadline=None)
@given(case=st.sampled_from([*TEXTS.items(), *(("hermes", text) for text in ODD)]), data=st.data())
def test_no_cut_changes_the_calls(case: tuple[str, str], data: st.DataObject) -> None:
    form, text = case
    whole = joined(fed(ToolCalls(FORMS[form]), [text]))
    assert joined(fed(ToolCalls(FORMS[form]), cut(text, data))) == whole


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [(ODD[0], ODD[0], []), (ODD[1], ODD[1], []), (ODD[2], ODD[2], []),
     (ODD[4], "", [("f", '{"x": "</tool_call> {\\"", "y": [1, {}]}')]),
     (ODD[5], "   said  behind", [("f", "{}")]), (ODD[6], "", [("f", "{}")])],
)  # fmt: skip
def test_what_is_no_call_stays_text(text: str, content: str, calls: object) -> None:
    texts, found = joined(fed(ToolCalls(FORMS["hermes"]), [text]))
    assert (texts["content"], found) == (content, calls)


SCHEMA = {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array"},
        "count": {"type": "integer"},
        "unit": {"type": ["string", "null"]},
        "any": {"enum": [1, "a"]},
    }
}


@pytest.mark.parametrize(
    ("written", "arguments"),
    [([("city", "12")], {"city": "12"}),
     ([("city", 'two\nlines <b> "x"')], {"city": 'two\nlines <b> "x"'}),
     ([("days", "[1, 2]"), ("count", "3")], {"days": [1, 2], "count": 3}),
     ([("count", "three"), ("unit", "null")], {"count": "three", "unit": None}),
     ([("unit", "C"), ("any", "1")], {"unit": "C", "any": 1}), ([("other", "5")], {"other": "5"})],
)  # fmt: skip
def test_tagged_arguments(written: list[tuple[str, str]], arguments: dict[str, object]) -> None:
    """They get the types of the function's schema; without one they are strings."""
    tags = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in written)
    call = f"<tool_call>\n<function=f>\n{tags}</function>\n</tool_call>"
    _, [(name, found)] = joined(fed(ToolCalls(FORMS["qwen3_coder"], {"f": SCHEMA}), [call]))
    assert (name, json.loads(found)) == ("f", arguments)


def test_what_is_no_tagged_call_stays_text() -> None:
    for text in ("<tool_call>weather</tool_call>", "<tool_call>\n<function=f>\n<parameter=a>\n1"):
        texts, calls = joined(fed(ToolCalls(FORMS["qwen3_coder"]), [text]))
        assert (texts["content"], calls) in ((text, []), ("", [("f", '{"a": "1"}')]))


def test_arguments_come_in_pieces() -> None:
    """Each piece of the arguments is told as soon as it is there."""
    calls = ToolCalls(FORMS["hermes"])
    assert calls.feed('<tool_call>{"name": "f", "arguments": {"te') == [
        AnswerPiece("name", "f"),
        AnswerPiece("arguments", '{"te'),
    ]
    assert calls.feed('xt": "ab') == [AnswerPiece("arguments", 'xt": "ab')]
    assert calls.feed('c"}') == [AnswerPiece("arguments", 'c"}')]
    assert calls.feed("}</tool_call>") == []


THOUGHTS = [
    (True, "I add.</think>\n132", ("I add.", "\n132")),
    (True, "never ends </thin", ("never ends </thin", "")),
    (False, "<think>\nI add.</think>132", ("\nI add.", "132")),
    (False, " \n<think>I</think>", ("I", "")),
    (False, "132, and <think> is a tag", ("", "132, and <think> is a tag")),
    (False, "<thi", ("", "<thi")),
    (False, "", ("", "")),
    (True, "a</think>b</think>c", ("a", "b</think>c")),
    (True, "<think>a</think>b", ("a", "b")),
    (False, "[think]a[/think]b", ("", "<think>a</think>b")),
    (True, "a[/think]b</think>c[think]", ("a</think>b", "c<think>")),
    (False, " [think]<think>a", ("", " <think><think>a")),
]
MARKS = {"<think>": 2, "</think>": 3}


def spans(text: str, data: st.DataObject) -> list[Span]:
    """Cuts a text: its marks are tokens of their own, [think] is the same text of other tokens."""
    found = []
    for part in re.split("(</?think>)", text):
        if part in MARKS:
            found.append(Span(part, False, MARKS[part]))
        elif part := part.replace("[think]", "<think>").replace("[/think]", "</think>"):
            found += [Span(piece, False) for piece in cut(part, data)]
    return found


@pytest.mark.parametrize(("open_thought", "text", "wanted"), THOUGHTS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_thoughts(
    open_thought: bool, text: str, wanted: tuple[str, str], data: st.DataObject
) -> None:
    splitter = ThinkingSplitter((2, 3), open_thought)
    pieces = [piece for span in spans(text, data) for piece in splitter.feed(span)]
    texts, _ = joined([*pieces, *splitter.finish()])
    assert (texts["reasoning"], texts["content"]) == wanted


def test_a_piece_is_there_as_soon_as_its_token() -> None:
    splitter = ThinkingSplitter((2, 3), True)
    assert splitter.feed(Span("it is 5.", True)) == [AnswerPiece("reasoning", "it is 5.", 0, True)]
    assert splitter.feed(Span("</think>", True, 3)) == []
    assert splitter.feed(Span("The ans", False)) == [AnswerPiece("content", "The ans")]
