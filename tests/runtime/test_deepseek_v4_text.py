"""The shipped template writes DeepSeek-V4's text as the encoder that the model was trained with.

The files of `deepseek_v4` are that encoder's own test cases and texts (`encoding/`, MIT). The other
texts are its README's, or were computed with it.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder.plan.recipe import find_model, find_shipped_template
from mtpbuild.runtime.errors import RequestError
from mtpbuild.runtime.text.chat_template import ChatTemplates, TemplateText
from mtpbuild.runtime.text.messages import render_messages
from mtpbuild.runtime.text.reasoning import opens_thought
from mtpbuild.runtime.text.tokenizer import Tokenizer, read_backend
from mtpbuild.runtime.tool_calls.calls import ToolCallParser
from mtpbuild.runtime.tool_calls.forms import FORMS
from tests.support.split_pieces import fed, joined

CASES = Path(__file__).parents[1] / "data" / "deepseek_v4"
PATH = find_shipped_template("deepseek_v4")
assert PATH is not None
TEMPLATES = ChatTemplates({"default": TemplateText("template", PATH.read_text(encoding="utf-8"))})
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
HEAD = "<｜Assistant｜>"
ADD = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is 2+2?"},
]
ADDED = BOS + "You are a helpful assistant.<｜User｜>What is 2+2?" + HEAD
F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def write(
    messages: list[Any],
    tools: Any = None,
    *,
    goes_on: Any = None,
    ends: bool = False,
    **kwargs: Any,
) -> str:
    """Write a conversation as a server does; ends: nothing is to follow it."""
    return render_messages(
        messages,
        lambda chat: TEMPLATES.render(
            chat,
            tools=tools,
            add_generation_prompt=False if ends else None,
            continue_final_message=goes_on,
            chat_template_kwargs=kwargs,
        ),
    )


def read_case(number: int) -> tuple[list[Any], Any, str]:
    """Return the messages and tools of a published case, and the text that they become."""
    case = json.loads((CASES / f"input_{number}.json").read_text(encoding="utf-8"))
    text = (CASES / f"output_{number}.txt").read_text(encoding="utf-8")
    return (case, None, text) if isinstance(case, list) else (case["messages"], case["tools"], text)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_published_cases(number: int) -> None:
    messages, tools, text = read_case(number)
    assert write(messages, tools, ends=True, thinking=number != 4) == text


def test_thoughts_are_opened_or_closed() -> None:
    assert write(ADD) == write(ADD, enable_thinking=True) == ADDED + "<think>"
    assert write(ADD, thinking=False) == write(ADD, enable_thinking=False) == ADDED + "</think>"
    assert write(ADD, thinking=True, reasoning_effort="none") == ADDED + "</think>"


@pytest.mark.parametrize("effort", ["high", "medium", "xhigh", "max", "ultra"])
def test_efforts(effort: str) -> None:
    """Their texts come before all others; without a thought there is none."""
    name = "effort_max.txt" if effort in ("max", "ultra") else "effort_high.txt"
    added = (CASES / name).read_text(encoding="utf-8")
    text = BOS + added + ADDED.removeprefix(BOS)
    assert write(ADD, reasoning_effort=effort) == text + "<think>"
    assert write(ADD, reasoning_effort=effort, thinking=False) == ADDED + "</think>"


@pytest.mark.parametrize("effort", [None, "low", "minimal"])
def test_low_effort_adds_nothing(effort: str | None) -> None:
    assert write(ADD, reasoning_effort=effort) == ADDED + "<think>"


def test_an_unknown_effort_is_refused() -> None:
    with pytest.raises(RequestError, match="reasoning_effort is none, low, high or max, not much"):
        write(ADD, reasoning_effort="much")


TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "reasoning_content": "r1", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "reasoning_content": "r2", "content": "d"},
]


def test_earlier_thoughts_are_dropped_unless_tools_are_declared() -> None:
    first, last = f"<｜User｜>a{HEAD}", f"b{EOS}<｜User｜>c{HEAD}<think>r2</think>d{EOS}"
    assert write(TURNS, ends=True) == BOS + first + "</think>" + last
    kept = first + "<think>r1</think>" + last
    assert write(TURNS, ends=True, drop_thinking=False) == BOS + kept
    declared = write(TURNS, [F], ends=True)
    assert declared.startswith(BOS + "\n\n## Tools\n\nYou have access")
    assert declared.endswith("to invoke tool calls.\n" + kept)


def make_calls(*ids: str) -> dict[str, Any]:
    calls = [{"id": i, "type": "function", "function": {"name": i, "arguments": "{}"}} for i in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def test_results_are_one_turn_in_the_order_of_the_calls() -> None:
    """A text between them keeps its place."""
    chat = [
        {"role": "user", "content": "a"},
        make_calls("second", "first"),
        {"role": "tool", "tool_call_id": "first", "content": "1"},
        {"role": "user", "content": "so"},
        {"role": "tool", "tool_call_id": "second", "content": "2"},
    ]
    turn = "<｜User｜><tool_result>2</tool_result>\n\nso\n\n<tool_result>1</tool_result>"
    assert write(chat).rpartition(EOS)[2] == turn + HEAD + "<think>"
    two = [{"role": "user", "content": "part 1"}, {"role": "user", "content": "part 2"}]
    assert write(two, thinking=False) == f"{BOS}<｜User｜>part 1\n\npart 2{HEAD}</think>"


def test_a_call_without_arguments_and_values_of_all_types() -> None:
    call = make_calls("f", "g")
    values = {"s": "a\n<b>&'", "n": None, "i": 5, "x": 1.5, "t": True, "l": [1, {"é": "ü"}]}
    call["tool_calls"][1]["function"]["arguments"] = json.dumps(values)
    text = write([TURNS[0], call], ends=True, thinking=False)
    assert text.partition("</think>")[2] == (
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="g">\n'
        '<｜DSML｜parameter name="s" string="true">a\n<b>&\'</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">null</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="i" string="false">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="x" string="false">1.5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="t" string="false">true</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="l" string="false">[1, {"é": "ü"}]</｜DSML｜parameter>\n'
        f"</｜DSML｜invoke>\n</｜DSML｜tool_calls>{EOS}"
    )


def test_arguments_that_are_no_json_are_one_text() -> None:
    call = make_calls("f")
    call["tool_calls"][0]["function"]["arguments"] = "{not JSON"
    text = write([TURNS[0], call], ends=True)
    assert '<｜DSML｜parameter name="arguments" string="true">{not JSON</' in text


def test_reminders_tasks_and_formats() -> None:
    """Fields of messages that the encoder reads, too."""
    chat: list[Any] = [
        {"role": "system", "content": "s", "response_format": {"a": "é"}},
        {"role": "latest_reminder", "content": "2026-02-21"},
        {"role": "user", "content": "u", "task": "query"},
    ]
    form = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
    text = f'{BOS}s{form}{{"a": "é"}}<｜latest_reminder｜>2026-02-21<｜User｜>u'
    assert write(chat) == text + "<｜query｜>"
    chat[2]["task"] = "action"
    assert write(chat) == f"{text}{HEAD}<think><｜action｜>"
    assert write(chat, thinking=False) == f"{text}{HEAD}</think><｜action｜>"


def test_a_task_stays_with_its_message_and_its_answer_has_no_thought() -> None:
    asked = {"role": "user", "content": "a", "task": "action"}
    answer = {"role": "assistant", "reasoning_content": "r", "content": "Search"}
    begun = f"{BOS}<｜User｜>a{HEAD}<think><｜action｜>Search{EOS}"
    assert write([asked, answer], ends=True) == begun
    assert write([asked, answer, TURNS[2]]) == f"{begun}<｜User｜>c{HEAD}<think>"
    assert write([asked, TURNS[2]]) == f"{BOS}<｜User｜>a<｜User｜>c{HEAD}<think>"
    reminder = {"role": "latest_reminder", "content": "d"}
    text = f"{BOS}<｜User｜>a{HEAD}<think><｜latest_reminder｜>d"
    assert write([TURNS[0], reminder]) == text, "the answer was opened before it"


def test_developers_messages_are_not_lost() -> None:
    """The encoder drops earlier ones with the thoughts; then they are the system's."""
    chat = [{"role": "developer", "content": "Be brief."}, *TURNS[:1]]
    assert write(chat) == f"{BOS}Be brief.<｜User｜>a{HEAD}<think>"
    assert write(chat, thinking=False) == f"{BOS}<｜User｜>Be brief.<｜User｜>a{HEAD}</think>"
    with pytest.raises(RequestError, match="unknown role robot"):
        write([{"role": "robot", "content": "a"}])


def test_an_answer_goes_on_and_follows_any_message() -> None:
    chat = [*TURNS[:1], {"role": "assistant", "content": "partial answer"}]
    text = f"{BOS}<｜User｜>a{HEAD}</think>partial answer"
    assert write(chat, goes_on=True, thinking=False) == text
    assert write(chat, thinking=False) == f"{text}{EOS}{HEAD}</think>"
    assert write(ADD[:1], thinking=False) == f"{BOS}You are a helpful assistant.{HEAD}</think>"


def test_written_calls_are_read_and_the_next_prompt_goes_on_from_them() -> None:
    """What the model wrote is what its turn becomes, so rows of the cache are found again."""
    messages, tools, text = read_case(1)
    before, head, rest = text.partition(HEAD + "<think>")
    thought, _, said = rest.partition(EOS)[0].partition("</think>")
    for lead in ("", "I look."):
        parser = ToolCallParser(FORMS["deepseek_v4"], {"get_weather": {}})
        texts, calls = joined(fed(parser, list(lead + said)))
        function = dict(zip(("name", "arguments"), calls[0], strict=True))
        turn: Any = {"role": "assistant", "content": texts["content"], "reasoning_content": thought}
        turn["tool_calls"] = [{"id": "x", "type": "function", "function": function}]
        written = write([*messages[:2], turn], tools, ends=True)
        assert written == f"{before}{head}{thought}</think>{lead}{said}{EOS}"


def test_thoughts_begin_in_the_prompt() -> None:
    backend = read_backend(find_model("deepseek-tiny").folder / "tokenizer.json")
    tokenizer = Tokenizer(backend, chat_template=TEMPLATES, bos_token=BOS)
    marks = tokenizer.added_tokens["<think>"], tokenizer.added_tokens["</think>"]
    for thinking in (True, False):
        prompt = tokenizer.encode(write(ADD, thinking=thinking))
        assert opens_thought(prompt, marks, tokenizer) is thinking
    asked = tokenizer.encode(write([{"role": "user", "content": "<think>"}], thinking=False))
    assert not opens_thought(asked, marks, tokenizer)
