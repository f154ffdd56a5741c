"""Incremental parsing of the tool calls in an answer.

Each parser is a state machine over characters: its joined pieces do not depend on how the text was
split. Anything that is not a call stays text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mtpbuild.runtime.reasoning import AnswerPiece
from mtpbuild.runtime.server.tools.call import Call
from mtpbuild.runtime.server.tools.forms import Form
from mtpbuild.runtime.server.tools.json_calls import JsonCall
from mtpbuild.runtime.server.tools.tagged import TaggedCall
from mtpbuild.runtime.text import marker_prefix_length

MOST_CUT = 8  # unfinished calls at the answer's end after which the rest is not parsed again


@dataclass(slots=True)
class ToolCalls:
    """A parser of the calls in one answer.

    tools: function -> JSON schema of its arguments, which gives arguments in tags their types.
    single: return only the first call, and nothing after it.
    """

    form: Form
    tools: Mapping[str, Any] = field(default_factory=dict)
    single: bool = False
    count: int = 0  # calls so far
    _held: str = field(default="", init=False)
    _call: Call | None = field(default=None, init=False)
    _space: str = field(default="", init=False)  # before the call; kept if it turns out to be text
    _cut: int = field(default=0, init=False)
    _markers: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        function = self.form.tags.name[0].strip() if self.form.tags else ""
        self._markers = (*self.form.markers, *([function] if function else []))

    def feed(self, text: str, *, last: bool = False) -> list[AnswerPiece]:
        """Parse more text and return the final pieces; with `last`, all remaining ones."""
        self._held += text
        pieces: list[AnswerPiece] = []
        while True:
            before = self._call, len(self._held)
            pieces += self._in_text(last) if self._call is None else self._in_call(self._call, last)
            if (self._call, len(self._held)) == before:
                return [piece for piece in pieces if piece.text]

    def _in_text(self, last: bool) -> list[AnswerPiece]:
        """Parse the text up to the next call; the markers around all calls are dropped."""
        found = min(
            ((at, m) for m in self._markers if (at := self._held.find(m)) >= 0), default=None
        )
        if found is None:
            kept = 0 if last else marker_prefix_length(self._held, *self._markers)
            certain = self._held[: len(self._held) - kept]
            said = self._content(certain)
            self._held = (
                "" if last else certain[len(self._trimmed(certain)) :] + self._held[len(certain) :]
            )
            return said
        at, marker = found
        text, self._held = self._held[:at], self._held[at + len(marker) :]
        said = self._content(text)
        if marker not in self.form.outer:
            self._space = text[len(self._trimmed(text)) :]
            tagged = self.form.tags is not None
            self._call = (
                TaggedCall(self.form, self.tools, marker) if tagged else JsonCall(self.form)
            )
        return said

    def _trimmed(self, text: str) -> str:
        """Drop the white space between and after calls, which is not part of the answer."""
        return text.rstrip() if self.count else text

    def _content(self, text: str) -> list[AnswerPiece]:
        return [] if self.single and self.count else [AnswerPiece("content", self._trimmed(text))]

    def _in_call(self, call: Call, last: bool) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        text, self._held = self._held, ""
        for kind, said in call.feed(text, last=last):
            if kind == "name":
                self.count += 1
            elif kind == "content":
                said, self._space = self._space + said, ""
            if self.single and self.count > (kind != "content"):
                continue
            pieces.append(AnswerPiece(kind, said, 0 if kind == "content" else self.count - 1))
        if call.rest is not None:
            self._held, self._call = call.rest, None
            self._cut += call.cut
            if call.cut and self._cut > MOST_CUT:
                pieces += self._content(self._held)
                self._held = ""
        return pieces
