"""Chat in the terminal: keys as they are typed, and what is on the screen."""

import io
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.history import InMemoryHistory

from mtpbuild.runtime import SamplingParams
from mtpbuild.runtime.cli import chat_terminal
from mtpbuild.runtime.cli.chat_terminal import AnswerScreen, make_session, open_history
from mtpbuild.runtime.cli.terminal import DIM, GREEN, RESET
from mtpbuild.runtime.text.detokenizer import Span
from tests.support.fakes import EOS, backend_tokenizer, fake_engine, fake_tokenizer, scripted
from tests.support.run_command import CTRL_C, CTRL_D, CTRL_J, ENTER, Terminal, typed

ALT_ENTER, UP = f"\x1b{ENTER}", "\x1b[A"


def pasted(text: str) -> str:
    return f"\x1b[200~{text}\x1b[201~"


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("hello", "hello"),
        (f"a{CTRL_J}b{ALT_ENTER}c", "a\nb\nc"),
        (pasted("def f():\r\n    return 1\r\n") + "why?", "def f():\n    return 1\nwhy?"),
    ],
)
def test_what_is_typed_is_one_message(keys: str, text: str) -> None:
    with typed(keys + ENTER):
        assert make_session(InMemoryHistory()).prompt("> ") == text


def test_a_draft_is_edited() -> None:
    with typed(f"!{ENTER}"):
        assert make_session(InMemoryHistory()).prompt("> ", default="hello") == "hello!"


def test_the_next_run_has_the_history(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    with typed(pasted("two\nlines") + ENTER):
        make_session(open_history(path)).prompt("> ")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with typed(f"{UP}{UP}{UP}!{ENTER}"):
        found = make_session(open_history(path)).prompt("> ")
    assert sorted(found) == sorted("two\nlines!")
    assert isinstance(open_history(path / "no folder"), InMemoryHistory)


def test_the_keys_of_a_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    """An edited question comes back as the text of the next one."""
    engine, _ = fake_engine(max_seq_len=400)
    keys = f"hi{ENTER}   {ENTER}/edit{ENTER} there{ENTER}{CTRL_D}"
    with typed(keys):
        chat_terminal.converse(engine, SamplingParams(5), None, {})
    shown = capsys.readouterr()
    wanted = [
        engine.chat([{"role": "user", "content": text}], SamplingParams(5)).content
        for text in ("hi", "hi there")
    ]
    assert shown.out == "".join(f"{text}\n" for text in wanted)
    assert shown.err.count("5 tokens (length)") == 2


def test_ctrl_c_leaves_an_edited_question_in_its_place(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    engine, _ = fake_engine(max_seq_len=400)
    saved = tmp_path / "chat.jsonl"
    with typed(f"hi{ENTER}/edit{ENTER} there{CTRL_C}and?{ENTER}/save {saved}{ENTER}{CTRL_D}"):
        chat_terminal.converse(engine, SamplingParams(5), None, {})
    turns = json.loads(saved.read_text(encoding="utf-8"))["messages"]
    assert [turn["content"] for turn in turns if turn["role"] == "user"] == ["hi", "and?"]
    capsys.readouterr()


def screen_of(*chunks: tuple[Span, ...], out: io.StringIO | None = None) -> str:
    out = Terminal() if out is None else out
    screen = AnswerScreen(out)
    for number, spans in enumerate(chunks, 1):
        screen.show(spans, number)
    screen.end()
    return out.getvalue()


THOUGHT: Any = [
    (Span("<think>", False, "begin"), Span("\nI add ", False, "reasoning")),
    (Span("47 and 85", True, "reasoning"),),
    (Span("</think>", False, "end"),),
    (Span("\n\n", True, "content"), Span("13", False, "content"), Span("2", True, "content")),
]


def test_a_thought_is_dimmed_and_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: 5.0)
    clear = "\r\x1b[K"
    assert screen_of(*THOUGHT) == (
        f"{clear}{DIM}I add{RESET}{clear}{DIM}I add 47 and 85{RESET}{clear}{DIM}I add 47 and 85"
        f"{RESET}{clear}{DIM}thought: 4 tokens, 0.0 s (/thought shows it){RESET}\n"
        f"13{GREEN}2{RESET}\n"
    )
    cut = screen_of(*THOUGHT[:2])
    assert cut.endswith(f"{clear}{DIM}thought: 2 tokens, 0.0 s (/thought shows it){RESET}\n\n")
    monkeypatch.setenv("NO_COLOR", "1")
    assert DIM not in screen_of(*THOUGHT)


@pytest.mark.parametrize("text", ["word " * 50, "思考" * 50])
def test_a_thought_has_one_line(text: str) -> None:
    """A character may take two columns, and a line that wraps could not be cleared."""
    shown = screen_of((Span(text, False, "reasoning"),)).partition(RESET)[0].partition(DIM)[2]
    columns = len(shown) * (1 + (text[0] != "w"))
    assert 30 < columns < 40
    assert text.strip().endswith(shown.strip())


def test_an_empty_thought_has_no_line() -> None:
    spans = (Span("<think>", False, "begin"), Span("\n\n", False, "reasoning"))
    shown = screen_of((*spans, Span("</think>", False, "end"), Span("\n\nYes", False)))
    assert shown == "Yes\n"


def test_a_file_gets_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = "".join(span.text for spans in THOUGHT for span in spans) + "\n"
    assert screen_of(*THOUGHT, out=io.StringIO()) == whole
    monkeypatch.setenv("TERM", "dumb")
    assert screen_of(*THOUGHT) == whole


def test_a_models_thought_is_folded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend, out = backend_tokenizer(), Terminal()
    tokens = [*backend.encode("<think>def</think>return", add_special_tokens=False).ids, EOS]
    engine, _ = fake_engine(fake_tokenizer(backend), next_token=scripted(2, tokens))
    monkeypatch.setattr("sys.stdout", out)
    answer = chat_terminal.show_answer(engine, [5, 6], SamplingParams(40))
    assert (answer.reasoning_content, answer.content) == ("def", "return")
    assert out.getvalue().endswith(" s (/thought shows it)\x1b[0m\n\x1b[32mret\x1b[0murn\n")
    assert "tokens (stop), " in capsys.readouterr().err
