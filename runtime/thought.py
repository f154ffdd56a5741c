"""Distinction of the tokens of a thought from those of the answer after it."""

from dataclasses import dataclass


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
