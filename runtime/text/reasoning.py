"""Splitting of an answer into thought and content while it is generated."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mtpbuild.runtime.text.detokenizer import Span
from mtpbuild.runtime.text.tokenizer import Tokenizer

BEGIN, END = "<think>", "</think>"
Kind = Literal["reasoning", "content", "name", "arguments"]


class AnswerPiece(NamedTuple):
    """A piece of an answer: text, or the name or arguments of tool call number `call`.

    from_draft: whether the token that completed the piece was an accepted draft. block: the number
    of the answer's block with this piece.
    """

    kind: Kind
    text: str
    call: int = 0
    from_draft: bool = False
    block: int = 0


def opens_thought(
    prompt: Sequence[int], marks: tuple[int, int], tokenizer: Tokenizer | None = None
) -> bool:
    """Tell whether a prompt ends inside a thought; marks: the tokens that begin and end one.

    Users' texts may contain both marks. So a thought must begin where the chat template puts it:
    right after the tokens that begin an answer, with no special token after it. Without a template,
    it must begin at the prompt's end. Without a tokenizer there are no users' texts, and the last
    mark decides.
    """
    at = next((i for i in range(len(prompt) - 1, -1, -1) if prompt[i] in marks), -1)
    if at < 0 or prompt[at] != marks[0]:
        return False
    if tokenizer is None:
        return True
    before, after = tokenizer.rstrip(prompt[:at]), prompt[at + 1 :]
    if not (head := tokenizer.answer_head):
        return not tokenizer.rstrip(after)
    return before[-len(head) :] == head and {*tokenizer.special_ids.values()}.isdisjoint(after)


@dataclass(slots=True)
class ThinkingSplitter:
    """A splitter of one answer; a thought begins with the answer or `<think>`, ends at `</think>`.

    marks: these two tokens. The same text from other tokens is plain text. thinking: whether the
    prompt has opened a thought.
    """

    marks: tuple[int, int]
    thinking: bool
    _started: bool = field(default=False, init=False)
    _space: list[AnswerPiece] = field(default_factory=list, init=False)  # white space at the start

    def feed(self, span: Span) -> list[AnswerPiece]:
        """Return the pieces whose kind is certain."""
        begin, end = self.marks
        if span.mark == begin and not self._started:
            self._started = self.thinking = True
            self._space.clear()
            return []
        if span.mark == end and self.thinking:
            self.thinking = False
            return self.finish()
        kind: Kind = "reasoning" if self.thinking else "content"
        piece = AnswerPiece(kind, span.text, from_draft=span.from_draft)
        if not (self._started or span.text.strip()):
            self._space.append(piece)
            return []
        return [*self.finish(), piece]

    def finish(self) -> list[AnswerPiece]:
        """Return the white space that was held back: no `<think>` follows it."""
        self._started = True
        pieces, self._space = self._space, []
        return pieces
