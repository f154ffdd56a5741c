"""Texts cut anywhere, fed to the parser of tool calls, and joined again."""

import itertools

from hypothesis import strategies as st

from mtpbuild.runtime.text.reasoning import AnswerPiece
from mtpbuild.runtime.tool_calls.calls import ToolCallParser


def joined(pieces: list[AnswerPiece]) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return texts by kind, and the calls with their arguments."""
    texts = {"content": "", "reasoning": ""}
    calls: list[list[str]] = []
    for piece in pieces:
        if piece.kind == "name":
            assert piece.call == len(calls), "calls are numbered from 0"
            calls.append([piece.text, ""])
        elif piece.kind == "arguments":
            calls[piece.call][1] += piece.text
        else:
            texts[piece.kind] += piece.text
    return texts, [(name, arguments) for name, arguments in calls]


def cut(text: str, data: st.DataObject) -> list[str]:
    places = data.draw(st.sets(st.integers(1, max(1, len(text) - 1))))
    ends = [0, *sorted(places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(ends)]


def fed(machine: ToolCallParser, parts: list[str]) -> list[AnswerPiece]:
    pieces = [p for part in parts for p in machine.feed(part)]
    return pieces + machine.feed("", last=True)
