"""Where a thought begins in a prompt, and the pieces of an answer by kind."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from mtpbuild.runtime.text.tokenizer import Tokenizer

Kind = Literal["reasoning", "content", "begin", "end", "name", "arguments"]


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
    """Tell whether a prompt ends inside a thought; marks: the tokens that begin and end thoughts.

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
