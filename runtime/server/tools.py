"""Finds tool calls in an answer, in the forms of several models, as the text comes.

Each form is a state machine over characters: its joined pieces do not depend on how the text was
cut. Anything that is not a call stays text.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mtpbuild.runtime.reasoning import Piece
from mtpbuild.runtime.text import held_back

SEPARATOR = "<｜tool▁sep｜>"


@dataclass(frozen=True, slots=True)
class Form:
    """Says how a model writes calls: the markers around all calls and around one, and its parts."""

    begin: str  # of a call
    end: str
    outer: tuple[str, ...] = ()  # markers around all calls, which are dropped
    # From the call's beginning to its arguments; group `name` is the function's.
    head: re.Pattern[str] | None = None  # None: the call is JSON with "name" and "arguments"
    tail: str = ""  # text between the arguments and the end
    # How a call is written: before the name, before the arguments, before the end.
    spelled: tuple[str, str, str] = ("", "", "")
    tagged: bool = False  # arguments stand in tags of their own, and strings without quotes

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, *self.outer)

    @property
    def tokens(self) -> tuple[str, ...]:
        """Returns the parts of a call that may be special tokens."""
        return (*self.markers, self.end, SEPARATOR)


CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
FORMS = {
    "deepseek_v3": Form(
        *CALL,
        CALLS,
        re.compile(r"\s*function<｜tool▁sep｜>(?P<name>[^\n]*)\n```json\n"),
        "\n```",
        ("function<｜tool▁sep｜>", "\n```json\n", "\n```"),
    ),
    "deepseek_v31": Form(
        *CALL,
        CALLS,
        re.compile(r"\s*(?P<name>.*?)<｜tool▁sep｜>", re.DOTALL),
        spelled=("", "<｜tool▁sep｜>", ""),
    ),
    "hermes": Form(
        "<tool_call>", "</tool_call>", spelled=('\n{"name": "', '", "arguments": ', "}\n")
    ),
    "qwen3_coder": Form("<tool_call>", "</tool_call>", tagged=True),
}
FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>(?P<body>.*?)(?:</function>)?\s*", re.DOTALL)
PARAMETER = re.compile(
    r"<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)",
    re.DOTALL,
)
JSON_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)'
)


def form_of(template: str) -> str | None:
    """Find the form that a chat template writes; None if it is none of ours."""
    if CALL[0] in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    return None


@dataclass(slots=True)
class ToolCalls:
    """Finds the calls in one answer.

    tools: the JSON schema of each function's arguments, from which tagged ones get their types.
    """

    form: Form
    tools: Mapping[str, Any] = field(default_factory=dict)
    count: int = 0  # calls so far
    _held: str = field(default="", init=False)
    _inside: bool = field(default=False, init=False)
    _named: bool = field(default=False, init=False)  # the open call's name is known
    _value: "JsonValue | None" = field(default=None, init=False)

    def feed(self, text: str, *, last: bool = False) -> list[Piece]:
        """Take text; returns the pieces that are certain, or with `last` all that are left."""
        self._held += text
        pieces: list[Piece] = []
        while True:
            before = self._inside, self._named, len(self._held)
            pieces += self._call(last) if self._inside else self._text(last)
            if (self._inside, self._named, len(self._held)) == before or not self._held:
                return [piece for piece in pieces if piece.text]

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _text(self, last: bool) -> list[Piece]:
        """Take the text up to the next call; markers around all calls are dropped."""
        found = min(
            ((at, m) for m in self.form.markers if (at := self._held.find(m)) >= 0), default=None
        )
        if found is None:
            kept = 0 if last else held_back(self._held, *self.form.markers)
            certain = self._held[: len(self._held) - kept]
            said = self._take(len(self._trimmed(certain)))
            if last:
                self._held = ""
            return [Piece("content", said)]
        at, marker = found
        said = self._trimmed(self._take(at))
        self._take(len(marker))
        self._inside = marker == self.form.begin
        return [Piece("content", said)]

    def _trimmed(self, text: str) -> str:
        """Drop the space between calls and after them, which is not part of the answer."""
        return text.rstrip() if self.count else text

    def _call(self, last: bool) -> list[Piece]:
        if not self._named:
            return self._head(last)
        call = self.count - 1
        if self._value is not None:
            text = self._take(self._value.scan(self._held))
            if not self._value.closed:
                return [Piece("arguments", text, call)]
            at = self._held.find(self.form.end)
            if at >= 0 or last:
                self._take(at + len(self.form.end) if at >= 0 else len(self._held))
                self._close()
            return [Piece("arguments", text, call)]
        ends = [self.form.tail + self.form.end, self.form.end]
        found = [(at, end) for end in ends if (at := self._held.find(end)) >= 0]
        if found:
            at, end = min(found)
            text = self._take(at)
            self._take(len(end))
            self._close()
        else:
            kept = 0 if last else held_back(self._held, *ends)
            text = self._take(len(self._held) - kept)
        return [Piece("arguments", text, call)]

    def _head(self, last: bool) -> list[Piece]:
        """Take the call's name once it is complete; a call without a name is text."""
        json_call = self.form.head is None
        tagged = self.form.tagged
        match = None if tagged else (self.form.head or JSON_HEAD).match(self._held)
        end = self._held.find(self.form.end)
        if match and not (0 <= end < match.end()):
            self._take(match.end())
            name = match["name"]
            self._value = JsonValue() if json_call else None
            return self._open(json.loads(name) if json_call else name.strip())
        if end < 0 and not last:
            return []
        whole = self._take(end if end >= 0 else len(self._held))
        self._take(len(self.form.end) if end >= 0 else 0)
        parse = self._tagged if tagged else _parsed
        call = parse(whole) if json_call else None
        if call is None:
            self._inside = False
            closed = self.form.end if end >= 0 else ""
            return [Piece("content", self.form.begin + whole + closed)]
        pieces = [*self._open(call[0]), Piece("arguments", call[1], self.count - 1)]
        self._close()
        return pieces

    def _tagged(self, text: str) -> tuple[str, str] | None:
        """Read name and arguments of a call in tags; None if it is none."""
        found = FUNCTION.fullmatch(text)
        if found is None:
            return None
        name = found["name"].strip()
        schema = self.tools.get(name)
        known = schema.get("properties") if isinstance(schema, dict) else None
        arguments = {
            each["name"].strip(): _typed(each["value"], known, each["name"].strip())
            for each in PARAMETER.finditer(found["body"])
        }
        return name, json.dumps(arguments, ensure_ascii=False)

    def _open(self, name: str) -> list[Piece]:
        self._named = True
        self.count += 1
        return [Piece("name", name, self.count - 1)]

    def _close(self) -> None:
        self._inside = self._named = False
        self._value = None


@dataclass(slots=True)
class JsonValue:
    """Finds the end of a JSON object or array whose text comes in pieces."""

    closed: bool = False
    _depth: int = 0
    _string: bool = False
    _escape: bool = False

    def scan(self, text: str) -> int:
        """Count how many of these characters belong to the value."""
        if self.closed:
            return 0
        for i, char in enumerate(text):
            if self._string:
                self._string = self._escape or char != '"'
                self._escape = char == "\\" and not self._escape
            elif char == '"':
                self._string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.closed = True
                    return i + (self._depth == 0)
        return len(text)


def _typed(text: str, properties: Any, name: str) -> Any:
    """Read a tagged argument: a string unless its schema has other types and the text is JSON."""
    schema = properties.get(name) if isinstance(properties, dict) else None
    kinds = schema.get("type", "any") if isinstance(schema, dict) else "string"
    if kinds == "string" or ("string" in kinds and text != "null"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _parsed(text: str) -> tuple[str, str] | None:
    """Read name and arguments of a call with its fields in another order; None if it is none."""
    try:
        call: Any = json.loads(text)
        arguments = call.get("arguments", call.get("parameters", {}))
        return str(call["name"]), json.dumps(arguments, ensure_ascii=False)
    except (ValueError, KeyError, AttributeError, RecursionError):
        return None
