"""The marks of thoughts in the vocabularies of models."""

from typing import NamedTuple


class ThoughtMarks(NamedTuple):
    """The tokens that begin and end a thought; `word` follows the first and is part of the mark."""

    begin: str
    end: str
    word: str = ""


THOUGHT_MARKS = (
    ThoughtMarks("<|channel>", "<channel|>", "thought\n"),
    ThoughtMarks("<think>", "</think>"),
)
THOUGHT_TOKENS = tuple(token for marks in THOUGHT_MARKS for token in marks[:2])
