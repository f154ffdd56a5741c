"""Turns tokens into text as they come: whole characters, cut before a stop string."""

import codecs
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mtpbuild.runtime.tokenizer import Tokenizer


class Span(NamedTuple):
    """Is the text that one token completed."""

    text: str
    from_draft: bool


class Prelude(Protocol):
    """Declares what knows how much of a text is a thought."""

    def take(self, text: str) -> int | None:
        """Take a token's text; returns how many characters at the end of all are no thought."""

    @property
    def over(self) -> bool:
        """Tells whether all that follows is no thought."""


def held_back(text: str, *markers: str) -> int:
    """Returns how many characters at the end of the text may begin a marker."""
    for length in range(min(len(text), max(map(len, markers)) - 1), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


class TextStream:
    """Makes the text of one request; the work per token does not grow with its length.

    `stopped_by` is the stop string that has ended it, `length` how many characters its tokens have
    given, those of the stop string included.

    Tokens are bytes, and a character may be spread over several: the decoder holds its beginning
    until the rest is there. The possible beginning of a stop string is held back too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: Sequence[str],
        shown: Sequence[int] = (),
        *,
        with_stop: bool = False,
        thought: Prelude | None = None,
        stop_in_thought: bool = False,
    ) -> None:
        """shown: special tokens whose names become part of the text.

        with_stop: whether the stop string that ends the text is a part of it. thought: in which
        stop strings do not count, unless `stop_in_thought`.
        """
        self._tokenizer, self._shown = tokenizer, frozenset(shown)
        self._stop, self._with_stop = stop, with_stop
        self.stopped_by: str | None = None
        self.length, self._thought = 0, thought
        self._stop_in_thought = stop_in_thought
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[Span] = []  # may begin a stop string
        self._ready: list[Span] = []

    def push(self, token: int, from_draft: bool, *, may_stop: bool = True) -> bool:
        """Append a token; returns True if it completes a stop string."""
        if self._tokenizer is None:
            return False
        raw = self._tokenizer.token_bytes(token)
        if token in self._shown:
            raw = (self._tokenizer.special_name(token) or "").encode() or raw
        if text := self._utf8.decode(raw):
            self._held.append(Span(text, from_draft))
            self.length += len(text)
        if self._thought is not None and not self._follow(self._thought, text):
            return False
        if self._stop and may_stop:
            return self._scan()
        self._ready += self._held
        self._held.clear()
        return False

    def take(self, *, everything: bool = False) -> tuple[Span, ...]:
        """Take the text since the last call; with `everything` also the text that is held back."""
        if everything:
            self._ready += self._held
            self._held.clear()
            if rest := self._utf8.decode(b"", final=True):  # half a character
                self._ready.append(Span(rest, False))
        spans = tuple(self._ready)
        self._ready.clear()
        return spans

    def _follow(self, thought: Prelude, text: str) -> bool:
        """Release what is a thought; returns whether stop strings count in the rest."""
        content = thought.take(text)
        if thought.over:
            self._thought = None
        if self._stop_in_thought:
            return True
        if content is not None:
            self._release(sum(len(span.text) for span in self._held) - content)
        return thought.over

    def _scan(self) -> bool:
        tail = "".join(span.text for span in self._held)
        if found := [(at, stop) for stop in self._stop if (at := tail.find(stop)) >= 0]:
            at, self.stopped_by = min(found)
            self._release(at + (len(self.stopped_by) if self._with_stop else 0))
            self._held.clear()
            self._utf8.reset()
            return True
        self._release(len(tail) - held_back(tail, *self._stop))
        return False

    def _release(self, chars: int) -> None:
        """Make the first `chars` held characters ready."""
        while chars > 0:
            text, from_draft = self._held.pop(0)
            self._ready.append(Span(text[:chars], from_draft))
            if len(text) > chars:
                self._held.insert(0, Span(text[chars:], from_draft))
            chars -= len(text)
