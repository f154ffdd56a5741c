"""Splits an answer into what was thought and what is said, however it comes in pieces."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

BEGIN, END = "<think>", "</think>"
Kind = Literal["reasoning", "content", "name", "arguments"]


class Piece(NamedTuple):
    """A piece of an answer; of a tool call (`call` counts from 0) its name or its arguments."""

    kind: Kind
    text: str
    call: int = 0


def held_back(text: str, *markers: str) -> int:
    """How many characters at the end of the text may be the beginning of a marker."""
    for length in range(min(len(text), max(map(len, markers)) - 1), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


@dataclass(slots=True)
class ThinkingSplitter:
    """What is thought ends at `</think>`; it begins with the answer, or with `<think>` there.

    thinking: whether the prompt has opened the thought.
    """

    thinking: bool
    _begun: bool = field(default=False, init=False)
    _held: str = field(default="", init=False)

    def feed(self, text: str, *, last: bool = False) -> list[Piece]:
        """What can be told apart so far; with `last` all of it."""
        text, self._held = self._held + text, ""
        if not self._begun:
            start = text.lstrip()
            if not last and BEGIN.startswith(start) and start != BEGIN:
                self._held = text
                return []
            self._begun = True
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
