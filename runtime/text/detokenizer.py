"""Conversion of a stream of tokens to text: whole characters, up to a stop string."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mtpbuild.runtime.text.tokenizer import Tokenizer

Part = Literal["reasoning", "content", "begin", "end"]  # begin, end: the marks of a thought


class Span(NamedTuple):
    """The text that one token completed, and the part of the answer that it belongs to.

    A thought's marks, and white space before its first mark, belong to neither content nor thought.
    """

    text: str
    from_draft: bool
    kind: Part = "content"


@dataclass(slots=True)
class Thought:
    """The state of an answer's thought, updated token by token.

    A thought begins with the answer or at `<think>`, and ends at `</think>`, or what the model has
    for them. marks: these two tokens; the same text from other tokens is plain text. thinking:
    whether the answer is inside the thought; at first, whether the prompt opened it. started:
    whether the answer has more than white space. tokens: the number of thought tokens so far, with
    its marks.
    """

    marks: tuple[int, int]
    thinking: bool
    started: bool = False
    tokens: int = 0
    _count: int = 0

    def take(self, token: int, text: str) -> Part:
        """Take a token and its text; return the kind of its span."""
        self._count += 1
        begin, end = self.marks
        thinking, started = self.thinking, self.started
        ends = thinking and token == end
        self.started = started or token == begin or ends or bool(text.strip())
        if token == begin and not started:
            self.thinking, self.tokens = True, self._count
            return "begin"
        if not thinking:
            return "content"
        self.tokens = self._count
        self.thinking = not ends
        return "end" if ends else "reasoning"


def measure_marker_prefix(text: str, *markers: str) -> int:
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
    arrives. The possible beginning of a stop string is held back too, and so are white space that a
    thought may follow and the word that belongs to a thought's mark. A stop string counts if its
    last character may end the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: Sequence[str],
        shown: Sequence[int] = (),
        *,
        with_stop: bool = False,
        thought: Thought | None = None,
        stop_in_thought: bool = False,
    ) -> None:
        """Start an empty text; shown: special tokens whose names become part of the text.

        with_stop: whether the stop string that ends the text is part of it. thought: splits the
        text; stop strings in a thought do not count, unless `stop_in_thought`.
        """
        self._tokenizer, self._shown = tokenizer, frozenset(shown)
        self._stop, self._with_stop = stop, with_stop
        self.stopped_by: str | None = None
        self.length, self._thought = 0, thought
        self._stop_in_thought = stop_in_thought
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending: list[Span] = []  # may begin a stop string
        self._unsearched = 0  # characters at the end of `_pending` that may end the text
        self._ready: list[Span] = []
        self._word = ""  # may follow the mark of the thought

    def push(self, token: int, from_draft: bool, *, may_stop: bool = True) -> bool:
        """Append a token; return True if it completes a stop string."""
        if self._tokenizer is None:
            return False
        raw = self._tokenizer.decode_token(token)
        if token in self._shown:
            raw = (self._tokenizer.find_special_name(token) or "").encode() or raw
        thought = self._thought
        if thought is not None and token in thought.marks:
            self._end_character(from_draft)
        text = self._utf8.decode(raw)
        kind: Part = "content" if thought is None else thought.take(token, text)
        self.length += len(text)
        if kind == "begin":  # only white space precedes it
            self._pending = [span._replace(kind=kind) for span in self._pending]
            self._word = self._tokenizer.find_thought_word(token)
        if text:
            self._pending.append(Span(text, from_draft, kind))
        started = thought is None or thought.started
        scans = bool(self._stop) and (kind == "content" or self._stop_in_thought)
        self._unsearched = self._unsearched + len(text) if scans and may_stop else 0
        if (started or self._stop_in_thought) and self.cut_at_stop():
            return True
        if started:
            waits = self._word and kind != "begin"
            held = self._mark_word(ended=kind == "end") if waits else 0
            self._release(max(held, measure_marker_prefix(self._tail, *self._stop) if scans else 0))
        return False

    def _mark_word(self, *, ended: bool) -> int:
        """Make a thought's word part of its mark; return the characters that may be the word."""
        text = "".join(span.text for span in self._pending if span.kind == "reasoning")
        if not ended and len(text) < len(self._word) and self._word.startswith(text):
            return len(text)
        left, spans = len(self._word) if text.startswith(self._word) else 0, list[Span]()
        for span in self._pending:
            cut = min(left, len(span.text)) if span.kind == "reasoning" else 0
            spans.append(span._replace(text=span.text[:cut], kind="begin"))
            spans.append(span._replace(text=span.text[cut:]))
            left -= cut
        self._pending, self._word = [span for span in spans if span.text], ""
        return 0

    def take(self, *, everything: bool = False) -> tuple[Span, ...]:
        """Return the text since the last call; with `everything` also the held-back text."""
        if everything:
            self._end_character(from_draft=False)
            self._release()
        spans = tuple(self._ready)
        self._ready.clear()
        return spans

    @property
    def _tail(self) -> str:
        return "".join(span.text for span in self._pending)

    def _end_character(self, from_draft: bool) -> None:
        """Write a replacement for a character that no token will complete."""
        if rest := self._utf8.decode(b"", final=True):
            thinking = self._thought is not None and self._thought.thinking
            self._pending.append(Span(rest, from_draft, "reasoning" if thinking else "content"))
            self.length += len(rest)
            if self._thought is not None:
                self._thought.started = True

    def cut_at_stop(self) -> bool:
        """Cut the pending text at a stop string; return False if there is none.

        After the last token it finds one in white space that was held back.
        """
        if not self._unsearched:
            return False
        tail = self._tail
        first_end, self._unsearched = len(tail) - self._unsearched + 1, 0
        starts = {stop: tail.find(stop, max(0, first_end - len(stop))) for stop in self._stop}
        places = [(at, stop) for stop, at in starts.items() if at >= 0]
        if places:
            at, self.stopped_by = min(places)
            self._emit(at + (len(self.stopped_by) if self._with_stop else 0), cut_marks=True)
            self._pending.clear()
            self._utf8.reset()
        return bool(places)

    def _release(self, held: int = 0) -> None:
        """Release the pending text except its last `held` characters."""
        if held:
            self._emit(len(self._tail) - held)
        else:
            self._ready += self._pending
            self._pending.clear()

    def _emit(self, chars: int, *, cut_marks: bool = False) -> None:
        """Release the first `chars` characters; a mark is kept back whole, or cut to plain text."""
        while chars > 0:
            span = self._pending.pop(0)
            if span.kind in ("begin", "end") and len(span.text) > chars:
                if not cut_marks:
                    self._pending.insert(0, span)
                    return
                span = span._replace(kind="content" if span.kind == "begin" else "reasoning")
            self._ready.append(span._replace(text=span.text[:chars]))
            if len(span.text) > chars:
                self._pending.insert(0, span._replace(text=span.text[chars:]))
            chars -= len(span.text)
