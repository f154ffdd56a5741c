"""Thoughts and tool calls are told from what is said, however the text is cut."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpbuild.runtime.text.detokenizer import Span, TextStream, Thought
from mtpbuild.runtime.text.reasoning import AnswerPiece
from mtpbuild.runtime.tool_calls.calls import ToolCallParser
from mtpbuild.runtime.tool_calls.forms import FORMS
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
V32 = (
    'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Ulm</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="time">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
V4 = V32.replace("function_calls", "tool_calls")
TEXTS = {"deepseek_v3": V3, "deepseek_v31": V31, "deepseek_v32": V32, "deepseek_v4": V4}
TEXTS |= {"hermes": HERMES, "qwen3_coder": QWEN}
ODD = (
    "no call, 1 < 2 <tool", "<tool_call>not JSON</tool_call> after", '<tool_call>{"name": "f"',
    '<tool_call>{"arguments": {"x": "</tool_call>"}, "name": "f"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": "</tool_call> {\\"", "y": [1, {}]}}</tool_call>  ',
    '  <tool_call>{"name": "f", "arguments": null}</tool_call> said  behind  ',
    '<tool_call>{"name": "f"}</tool_call>',
)  # fmt: skip


@pytest.mark.parametrize("form", TEXTS)
def test_calls(form: str) -> None:
    texts, calls = joined(fed(ToolCallParser(FORMS[form]), [TEXTS[form]]))
    assert texts["content"] == "I look."
    said = [(name, json.loads(arguments)) for name, arguments in calls]
    assert said == [("weather", {"city": "Ulm"}), ("time", {})]


@settings(max_examples=300, deadline=None)
@given(case=st.sampled_from([*TEXTS.items(), *(("hermes", text) for text in ODD)]), data=st.data())
def test_no_cut_changes_the_calls(case: tuple[str, str], data: st.DataObject) -> None:
    form, text = case
    whole = joined(fed(ToolCallParser(FORMS[form]), [text]))
    assert joined(fed(ToolCallParser(FORMS[form]), cut(text, data))) == whole


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [(ODD[0], ODD[0], []), (ODD[1], ODD[1], []), (ODD[2], ODD[2], []),
     (ODD[4], "", [("f", '{"x": "</tool_call> {\\"", "y": [1, {}]}')]),
     (ODD[5], "   said  behind", [("f", "{}")]), (ODD[6], "", [("f", "{}")])],
)  # fmt: skip
def test_what_is_no_call_stays_text(text: str, content: str, calls: object) -> None:
    texts, found = joined(fed(ToolCallParser(FORMS["hermes"]), [text]))
    assert (texts["content"], found) == (content, calls)


def test_arguments_come_in_pieces() -> None:
    """Each piece of the arguments is told as soon as it is there."""
    calls = ToolCallParser(FORMS["hermes"])
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
WORD = "thought\n"  # follows the first mark in some models
THOUGHTS_WITH_A_WORD = [
    (False, "<think>thought\nI add.</think>132", ("I add.", "132")),
    (False, " \n<think>thought\nthought\nI</think>", ("thought\nI", "")),
    (False, "<think>thought\n</think>132", ("", "132")),
    (False, "<think></think>thought\n132", ("", "thought\n132")),
    (False, "<think>thoughts</think>132", ("thoughts", "132")),
    (False, "<think>though</think>132", ("though", "132")),
    (False, "<think>the sum</think>132", ("the sum", "132")),
    (False, "<think>thou", ("thou", "")),
    (True, "thought\nI add.</think>132", ("thought\nI add.", "132")),
    (False, "132 <think>thought\n", ("", "132 <think>thought\n")),
]
MARKS = {"<think>": 2, "</think>": 3}


class Pieces:
    """A tokenizer for one text: a token for each mark, and one for each other piece."""

    def __init__(self, texts: list[str], word: str = "") -> None:
        self.texts, self.word = texts, word

    def decode_token(self, token: int) -> bytes:
        return b"" if token in MARKS.values() else self.texts[token].encode()

    def find_special_name(self, token: int) -> str:
        return self.texts[token]

    def find_thought_word(self, token: int) -> str:
        return self.word


def answer_spans(
    open_thought: bool, pieces: list[str | int], word: str = ""
) -> list[tuple[Span, ...]]:
    """Return what each piece of an answer becomes: a number is a mark, a text any other token."""
    tokenizer = Pieces(["", "", *MARKS], word)
    thought = Thought((2, 3), open_thought)
    stream = TextStream(tokenizer, (), [*MARKS.values()], thought=thought)  # type: ignore[arg-type]
    found = []
    for piece in pieces:
        if isinstance(piece, str):
            tokenizer.texts.append(piece)
            piece = len(tokenizer.texts) - 1
        stream.push(piece, True)
        found.append(stream.take())
    return [*found, stream.take(everything=True)]


@pytest.mark.parametrize(
    ("word", "open_thought", "text", "wanted"),
    [*(("", *case) for case in THOUGHTS), *((WORD, *case) for case in THOUGHTS_WITH_A_WORD)],
)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_thoughts(
    word: str, open_thought: bool, text: str, wanted: tuple[str, str], data: st.DataObject
) -> None:
    pieces: list[str | int] = []
    for part in re.split("(</?think>)", text):  # [think] is the same text of other tokens
        plain = part.replace("[think]", "<think>").replace("[/think]", "</think>")
        pieces += [MARKS[part]] if part in MARKS else cut(plain, data)
    spans = [span for found in answer_spans(open_thought, pieces, word) for span in found]
    plain = text.replace("[think]", "<think>").replace("[/think]", "</think>")
    assert "".join(span.text for span in spans) == plain
    thought, content = (
        "".join(span.text for span in spans if span.kind == kind)
        for kind in ("reasoning", "content")
    )
    assert (thought, content) == wanted


def test_a_piece_is_there_as_soon_as_its_token() -> None:
    first, mark, second, _ = answer_spans(True, ["it is 5.", 3, "The ans"])
    assert first == (Span("it is 5.", True, "reasoning"),)
    assert mark == (Span("</think>", True, "end"),)
    assert second == (Span("The ans", True),)


def test_a_thoughts_word_waits_until_it_is_whole() -> None:
    spans = answer_spans(False, [2, "thou", "ght\nit", " is"], WORD)
    mark, first, rest = (Span(text, True, "begin") for text in ("<think>", "thou", "ght\n"))
    thought, more = (Span(text, True, "reasoning") for text in ("it", " is"))
    assert spans == [(mark,), (), (first, rest, thought), (more,), ()]
