"""Incremental parsing of the tool calls in an answer.

Each parser is a state machine over characters: the joined pieces of its output do not depend on how
its input was split. Anything that is not a call stays text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mtpbuild.runtime.text.detokenizer import measure_marker_prefix
from mtpbuild.runtime.text.reasoning import AnswerPiece
from mtpbuild.runtime.tool_calls.forms import CallParser, Form
from mtpbuild.runtime.tool_calls.json_calls import JsonCallParser
from mtpbuild.runtime.tool_calls.tagged import TaggedCallParser


@dataclass(slots=True)
class ToolCallParser:
    """A parser of the calls in one answer.

    tools: function -> JSON schema of its arguments, which gives arguments in tags their types.
    single: return only the first call, and nothing after it. forced: the answer must be calls.
    cut: the text of a whole answer in place of a call that the answer's end has cut; None if all
    calls are closed. Such a call is never completed: its arguments end where the model's text ends.
    cut_named: whether the name of that call has been returned.
    """

    form: Form
    tools: Mapping[str, Any] = field(default_factory=dict)
    single: bool = False
    forced: bool = False
    count: int = 0  # calls so far
    cut: str | None = field(default=None, init=False)
    cut_named: bool = field(default=False, init=False)
    _pending: str = field(default="", init=False)
    _call: CallParser | None = field(default=None, init=False)
    _space: str = field(default="", init=False)  # before the call; kept if it turns out to be text
    _raw: list[str] = field(default_factory=list, init=False)  # the text of the newest call
    _closed: int = field(default=0, init=False)  # calls before the newest one
    _said: bool = field(default=False, init=False)  # whether the content has more than white space
    _markers: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        function = self.form.tags.name[0].strip() if self.form.tags else ""
        lead = (self.form.lead + self.form.begin,) if self.form.lead else ()
        self._markers = (*lead, *self.form.markers, *([function] if function else []))

    def feed(self, text: str, *, last: bool = False) -> list[AnswerPiece]:
        """Parse more text and return the final pieces; with `last`, all remaining ones."""
        self._pending += text
        pieces: list[AnswerPiece] = []
        while True:
            before = self._call, len(self._pending)
            pieces += self._in_text(last) if self._call is None else self._in_call(self._call, last)
            if (self._call, len(self._pending)) == before:
                return [piece for piece in pieces if piece.text]

    def _in_text(self, last: bool) -> list[AnswerPiece]:
        """Parse the text up to the next call; the markers around all calls are dropped."""
        text, marker = self._pending, ""
        places = [(at, marker) for marker in self._markers if (at := text.find(marker)) >= 0]
        if places:
            at, marker = min(places)
        else:  # the end of the text may begin a marker
            at = len(text) - (0 if last else measure_marker_prefix(text, *self._markers))
        text, self._pending = text[:at], text[at + len(marker) :]
        space = text[len(self._trim(text)) :]
        lead = self.form.lead if marker.startswith(self.form.lead) else ""
        if not places:
            self._pending = "" if last else space + self._pending
        elif marker not in self.form.outer:
            marker = marker.removeprefix(self.form.lead)
            self._space, self._raw, self._closed = space + lead, [marker], self.count
            if self.form.tags is None:
                self._call = JsonCallParser(self.form)
            else:
                self._call = TaggedCallParser(self.form, self.tools, marker)
        return self._make_content(text)

    def _trim(self, text: str) -> str:
        """Drop the white space between and after calls, which is not part of the answer."""
        return text.rstrip() if self.count else text

    def _make_content(self, text: str) -> list[AnswerPiece]:
        if self.single and self.count:
            return []
        self._said = self._said or bool(text.strip())
        return [AnswerPiece("content", self._trim(text))]

    def _in_call(self, call: CallParser, last: bool) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        text, self._pending = self._pending, ""
        self._raw.append(text)
        for kind, parts in call.feed(text, last=last):
            if kind == "name":
                self.count += 1
            elif kind == "content":
                parts, self._space = self._space + parts, ""
            if self.single and self.count > (kind != "content"):  # not of the first call
                continue
            pieces.append(AnswerPiece(kind, parts, 0 if kind == "content" else self.count - 1))
        if call.rest is not None:
            self._pending, self._call = call.rest, None
        return pieces + (self._end_truncated() if call.truncated else [])

    def _end_truncated(self) -> list[AnswerPiece]:
        """Set `cut`, and return the text of a call without a name if nothing else was said."""
        if self.single and self._closed:
            return []
        self.cut_named = self.count > self._closed
        self.cut = "" if self.forced or self._said or self._closed else "".join(self._raw)
        return [] if self.cut_named else [AnswerPiece("content", self.cut)]
