"""The formats in which models write tool calls, under the names of vLLM's parsers."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

SEPARATOR = "<｜tool▁sep｜>"
DSML = "｜DSML｜"
INDEX_OF_CALL = "{index}"  # placeholder for the call's number
CallPart = tuple[Literal["content", "name", "arguments"], str]


@dataclass(frozen=True, slots=True)
class Tags:
    """The markup of a call with its arguments in tags, as the chat template writes it.

    A model may leave out or double the line breaks in the markup. It may also add a line break next
    to a string, unless the template itself puts one there.
    """

    name: tuple[str, str]  # before and after the function's name
    key: str  # before an argument's name
    value: tuple[str, str]  # before and after its value
    end: str = ""  # of one function
    other: tuple[str, str] | None = None  # `value` for non-strings, if it differs


@dataclass(frozen=True, slots=True)
class Form:
    """The format of a model's calls: markers around all calls and each call, and its parts."""

    begin: str  # of a call; with tags: of one or more functions
    end: str
    outer: tuple[str, ...] = ()  # markers around all calls, which are dropped
    # Matches from the call's beginning to its arguments; group `name` is the function's name.
    head: re.Pattern[str] | None = None  # None: the call is JSON with "name" and "arguments"
    # The text before the name, before the arguments, and before the end marker.
    spelled: tuple[str, str, str] = ("", "", "")
    tags: Tags | None = None
    quote: str = ""  # stands on both sides of a string, which is literal inside; keys are bare
    inner: tuple[str, ...] = ()  # other parts of a call that may be special tokens
    lead: str = ""  # white space before `begin` that belongs to the call, not to the answer

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, *self.outer)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The parts of a call that may be special tokens."""
        return (*self.markers, self.end, *self.inner)


class CallParser:
    """A parser of one call, or of several within the same markers.

    rest: the text after the call; None until the call is over. truncated: whether the text ended
    before the call was closed, by its JSON value or its last tag; then there is no rest.
    """

    rest: str | None = None
    truncated = False

    def feed(self, text: str, *, last: bool) -> list[CallPart]:
        """Parse more text and return what is final. last: no text follows."""
        raise NotImplementedError


def call_parts(calls: Iterable[tuple[str, str]]) -> list[CallPart]:
    """Return the parts of complete calls, given as names and arguments."""
    pairs: list[list[CallPart]] = [[("name", name), ("arguments", text)] for name, text in calls]
    return [part for pair in pairs for part in pair]


def write_dsml_form(block: str) -> Form:
    """Return the form of DeepSeek's markup language; block: the tag around the calls."""
    return Form(
        f"<{DSML}{block}>",
        f"</{DSML}{block}>",
        tags=Tags(
            (f'\n<{DSML}invoke name="', '">\n'),
            f'<{DSML}parameter name="',
            ('" string="true">', f"</{DSML}parameter>\n"),
            f"</{DSML}invoke>\n",
            ('" string="false">', f"</{DSML}parameter>\n"),
        ),
        inner=(DSML,),
        lead="\n\n",
    )


CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
HERMES = ("<tool_call>", "</tool_call>")
GLM = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
FORMS = {
    "deepseek_v3": Form(
        *CALL,
        CALLS,
        re.compile(r"\s*function<｜tool▁sep｜>[ \t]*(?P<name>[^\n<]*?)[ \t]*\n"),
        ("function<｜tool▁sep｜>", "\n```json\n", "\n```"),
        inner=(SEPARATOR,),
    ),
    "deepseek_v31": Form(
        *CALL,
        CALLS,
        re.compile(r"\s*(?P<name>[^\n<]*?)\s*<｜tool▁sep｜>"),
        ("", SEPARATOR, ""),
        inner=(SEPARATOR,),
    ),
    "deepseek_v32": write_dsml_form("function_calls"),
    "deepseek_v4": write_dsml_form("tool_calls"),
    "gemma4": Form(
        "<|tool_call>",
        "<tool_call|>",
        head=re.compile(r"\s*call:\s*(?P<name>[^\s<{}]+)\s*(?=[{<])"),
        spelled=("call:", "", ""),
        quote='<|"|>',
        inner=('<|"|>',),
    ),
    "glm45": Form(
        *HERMES, tags=Tags(("", "\n"), GLM[0], (f"{GLM[1]}\n{GLM[2]}", f"{GLM[3]}\n")), inner=GLM
    ),
    "glm47": Form(*HERMES, tags=Tags(("", ""), GLM[0], (f"{GLM[1]}{GLM[2]}", GLM[3])), inner=GLM),
    "hermes": Form(*HERMES, spelled=('\n{"name": "', '", "arguments": ', "}\n")),
    "kimi_k2": Form(
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        re.compile(
            r"\s*(?:functions\.)?(?P<name>[^\n<:]*?)(?::\d+)?\s*<\|tool_call_argument_begin\|>"
        ),
        ("functions.", f":{INDEX_OF_CALL}<|tool_call_argument_begin|>", ""),
        inner=("<|tool_call_argument_begin|>",),
    ),
    "minimax_m2": Form(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        tags=Tags(
            ('\n<invoke name="', '">\n'),
            '<parameter name="',
            ('">', "</parameter>\n"),
            "</invoke>\n",
        ),
    ),
    "qwen3_coder": Form(
        *HERMES,
        tags=Tags(
            ("\n<function=", ">\n"), "<parameter=", (">\n", "\n</parameter>\n"), "</function>\n"
        ),
    ),
}
