"""Splits an answer into its thought and its content while it comes in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mtpbuild.runtime.text import Span
from mtpbuild.runtime.tokenizer import Tokenizer

BEGIN, END = "<think>", "</think>"
Kind = Literal["reasoning", "content", "name", "arguments"]


class Piece(NamedTuple):
    """Is a piece of an answer: its text, or the name or arguments of tool call number `call`.

    from_draft: whether the token that completed the piece was an accepted draft. block: which of
    the answer's blocks has the piece.
    """

    kind: Kind
    text: str
    call: int = 0
    from_draft: bool = False
    block: int = 0


def opens_thought(
    prompt: Sequence[int], marks: tuple[int, int], tokenizer: Tokenizer | None = None
) -> bool:
    """Tell whether a prompt ends within a thought; marks: the tokens that begin and end one.

    Texts of users may contain both. So a thought begins where the chat template puts it: right
    after the tokens that begin an answer, of which no other follows. Without a template, at the
    prompt's end. Without a tokenizer nobody's text is in the prompt, and the last mark counts.
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
    """Splits one answer: a thought begins with the answer or `<think>`, and ends at `</think>`.

    marks: these two tokens. The same text of other tokens is text. thinking: whether the prompt has
    opened the thought.
    """

    marks: tuple[int, int]
    thinking: bool
    _begun: bool = field(default=False, init=False)
    _space: list[Piece] = field(default_factory=list, init=False)  # before what comes first

    def feed(self, span: Span) -> list[Piece]:
        """Return the pieces that are certain."""
        begin, end = self.marks
        if span.mark == begin and not self._begun:
            self._begun = self.thinking = True
            self._space.clear()
            return []
        if span.mark == end and self.thinking:
            self.thinking = False
            return self.finish()
        kind: Kind = "reasoning" if self.thinking else "content"
        piece = Piece(kind, span.text, from_draft=span.from_draft)
        if not (self._begun or span.text.strip()):
            self._space.append(piece)
            return []
        return [*self.finish(), piece]

    def finish(self) -> list[Piece]:
        """Return the pieces that were held back, as the answer does not begin with `<think>`."""
        self._begun = True
        pieces, self._space = self._space, []
        return pieces
