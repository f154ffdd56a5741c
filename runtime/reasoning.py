"""Splits an answer into its thought and its content while it comes in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mtpbuild.runtime.text import held_back

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


def opens_thought(prompt: Sequence[int], marks: tuple[int, int]) -> bool:
    """Tells whether a prompt ends within a thought; marks: the tokens that begin and end one."""
    return next((token == marks[0] for token in reversed(prompt) if token in marks), False)


@dataclass(slots=True)
class ThinkingSplitter:
    """Splits one answer: a thought begins with the answer or `<think>`, and ends at `</think>`.

    thinking: whether the prompt has opened the thought.
    """

    thinking: bool
    certain: bool = field(default=False, init=False)  # whether it is known how the answer begins
    _held: str = field(default="", init=False)

    def feed(self, text: str, *, last: bool = False) -> list[Piece]:
        """Returns the pieces that are certain, or with `last` all that are left."""
        text, self._held = self._held + text, ""
        if not self.certain:
            start = text.lstrip()
            if not last and BEGIN.startswith(start) and start != BEGIN:
                self._held = text
                return []
            self.certain = True
            if start.startswith(BEGIN):
                self.thinking, text = True, start.removeprefix(BEGIN)
        if not self.thinking:
            return [Piece("content", text)] if text else []
        thought, mark, said = text.partition(END)
        if mark:
            self.thinking = False
            pieces = Piece("reasoning", thought), Piece("content", said)
        else:
            kept = 0 if last else held_back(text, END)
            self._held = text[len(text) - kept :]
            pieces = Piece("reasoning", text[: len(text) - kept]), Piece("content", "")
        return [piece for piece in pieces if piece.text]


@dataclass(slots=True)
class Thought:
    """Follows an answer token by token: which of its tokens are a thought, where the rest begins.

    tokens: of the thought so far, with the marks that begin and end it.
    """

    splitter: ThinkingSplitter
    tokens: int = 0
    _taken: int = 0

    def take(self, text: str) -> int | None:
        """Take a token's text; returns how many characters at the end of all are no thought.

        None: it is not known yet whether there is a thought.
        """
        self._taken += 1
        thinks = self.splitter.thinking
        pieces = self.splitter.feed(text)
        if thinks or self.splitter.thinking or any(piece.kind == "reasoning" for piece in pieces):
            self.tokens = self._taken
        if not self.splitter.certain:
            return None
        return sum(len(piece.text) for piece in pieces if piece.kind == "content")

    @property
    def over(self) -> bool:
        """Tells whether the thought has ended, or that there is none."""
        return self.splitter.certain and not self.splitter.thinking
