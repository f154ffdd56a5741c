"""Conversion of tokens to text in a stream: whole characters, cut before a stop string."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mtpbuild.runtime.text.tokenizer import Tokenizer


class Span(NamedTuple):
    """The text that one token completed.

    mark: the token, if it is one of the stream's `marks`.
    """

    text: str
    from_draft: bool
    mark: int | None = None


@dataclass(slots=True)
class Thought:
    """The state of an answer's thought, updated token by token.

    marks: the tokens that begin and end a thought. thinking: whether the answer is inside the
    thought; at first, whether the prompt opened it. tokens: the number of thought tokens so far,
    with its marks.
    """

    marks: tuple[int, int]
    thinking: bool
    tokens: int = 0
    _started: bool = False
    _count: int = 0

    def take(self, token: int, text: str) -> bool | None:
        """Take a token and its text; return whether it belongs to the thought; None: unknown."""
        self._count += 1
        begin, end = self.marks
        belongs = self.thinking
        if token == begin and not self._started:
            belongs = self.thinking = self._started = True
        elif belongs and token == end:
            self.thinking, self._started = False, True
        elif text.strip():
            self._started = True
        if belongs:
            self.tokens = self._count
        return belongs if belongs or self._started else None


def marker_prefix_length(text: str, *markers: str) -> int:
    """Return the number of characters at the end of the text that may begin a marker."""
    for length in range(min(len(text), max(map(len, markers)) - 1), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


class TextStream:
    """The text of one request; the work per token does not depend on the text's length.

    `stopped_by` is the stop string that ended it. `length` is the number of characters of all
    tokens, including those of the stop string.

    A character may be spread over several tokens: the decoder keeps its first bytes until the rest
    arrives. The possible beginning of a stop string is held back too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: Sequence[str],
        shown: Sequence[int] = (),
        *,
        with_stop: bool = False,
        marks: Sequence[int] = (),
        thought: Thought | None = None,
        stop_in_thought: bool = False,
    ) -> None:
        """Start an empty text; shown: special tokens whose names become part of the text.

        with_stop: whether the stop string that ends the text is part of it. marks: tokens that get
        spans of their own, to distinguish them from the same text of other tokens. thought: stop
        strings in it do not count, unless `stop_in_thought`.
        """
        self._tokenizer, self._shown = tokenizer, frozenset(shown)
        self._stop, self._with_stop, self._marks = stop, with_stop, frozenset(marks)
        self.stopped_by: str | None = None
        self.length, self._thought = 0, thought
        self._stop_in_thought = stop_in_thought
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending: list[Span] = []  # may begin a stop string
        self._ready: list[Span] = []

    def push(self, token: int, from_draft: bool, *, may_stop: bool = True) -> bool:
        """Append a token; return True if it completes a stop string."""
        if self._tokenizer is None:
            return False
        raw = self._tokenizer.token_bytes(token)
        if token in self._shown:
            raw = (self._tokenizer.special_name(token) or "").encode() or raw
        mark = token if token in self._marks else None
        rest = "" if mark is None else self._utf8.decode(b"", final=True)
        if rest:  # an incomplete character
            self._pending.append(Span(rest, from_draft))
        if text := self._utf8.decode(raw):
            self._pending.append(Span(text, from_draft, mark))
        self.length += len(rest) + len(text)
        if self._thought is not None:
            belongs = self._thought.take(token, text)
            if belongs is not False and not self._stop_in_thought:
                if belongs:
                    self._free()
                return False
        if self._stop and may_stop:
            return self._scan()
        self._free()
        return False

    def take(self, *, everything: bool = False) -> tuple[Span, ...]:
        """Return the text since the last call; with `everything` also the held-back text."""
        if everything:
            self._free()
            if rest := self._utf8.decode(b"", final=True):  # an incomplete character
                self._ready.append(Span(rest, False))
        spans = tuple(self._ready)
        self._ready.clear()
        return spans

    def _free(self) -> None:
        self._ready += self._pending
        self._pending.clear()

    def _scan(self) -> bool:
        tail = "".join(span.text for span in self._pending)
        if found := [(at, stop) for stop in self._stop if (at := tail.find(stop)) >= 0]:
            at, self.stopped_by = min(found)
            self._release(at + (len(self.stopped_by) if self._with_stop else 0), cut_marks=True)
            self._pending.clear()
            self._utf8.reset()
            return True
        self._release(len(tail) - marker_prefix_length(tail, *self._stop))
        return False

    def _release(self, chars: int, *, cut_marks: bool = False) -> None:
        """Release the first `chars` held characters; a mark stays whole or becomes plain text."""
        while chars > 0:
            span = self._pending.pop(0)
            if span.mark is not None and len(span.text) > chars:
                if not cut_marks:
                    self._pending.insert(0, span)
                    return
                span = span._replace(mark=None)
            self._ready.append(span._replace(text=span.text[:chars]))
            if len(span.text) > chars:
                self._pending.insert(0, span._replace(text=span.text[chars:]))
            chars -= len(span.text)
