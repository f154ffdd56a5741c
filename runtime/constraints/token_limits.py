"""Limits on a request's tokens: only allowed tokens, and no bad words."""

from collections.abc import Sequence

import numpy as np

from mtpbuild.runtime.contract.controls import WORD
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import Constraint
from mtpbuild.runtime.errors import RequestError
from mtpbuild.runtime.sampling.params import SamplingParams
from mtpbuild.runtime.text.tokenizer import Tokenizer


def _make_words_error(problem: str) -> RequestError:
    return RequestError(f"bad_words: {problem}", "bad_words")


class TokenLimits:
    """The limits of a request's tokens, as a `Grammar` that forces nothing.

    As in vLLM, a bad word is a sequence of tokens; its last token is forbidden when the answer ends
    with the others.
    """

    def __init__(
        self, params: SamplingParams, manifest: Manifest, tokenizer: Tokenizer | None
    ) -> None:
        """Raise RequestError for tokens outside the vocabulary or if no first token is allowed."""
        size = manifest.model.vocab_size
        self._window, self._taken = manifest.window, 0
        self._output = list[int]()  # the answer's last tokens, as many as a bad word may have
        self._free = np.ones(size, bool)  # [V] tokens that may be emitted after any answer
        if (allowed := params.allowed_token_ids) is not None:
            self._free[:] = False
            self._free[[*allowed]] = True
        if params.bad_words and tokenizer is None:
            raise _make_words_error("this engine was built without a tokenizer")
        words = [ids for text in params.bad_words for ids in encode_bad_word(text, tokenizer)]
        if (id := max((id for ids in words for id in ids), default=0)) >= size:
            raise _make_words_error(f"token id {id} is outside the vocabulary 0..{size - 1}")
        self._free[[ids[0] for ids in words if len(ids) == 1]] = False
        self._bad = [ids for ids in words if len(ids) > 1]
        # Steps forbid end tokens before min_tokens too, but the check below comes before any step.
        ends = params.end_ids(manifest.model.eos_token_ids)
        self._before_min_tokens, self._min_tokens = self._free.copy(), params.min_tokens
        self._before_min_tokens[[id for id in ends if id < size]] = False
        if not self._find_allowed_tokens([], 0).any():
            name = "allowed_token_ids" if allowed is not None else "bad_words"
            raise RequestError(f"{name}: no token is left that an answer could begin with", name)
        self.kept = 0

    def make_next_constraint(self, drafts: Sequence[int]) -> Constraint:
        """Return the tokens that each row may emit after the drafts before it.

        Drafts after which no token is allowed are dropped. Raises RequestError if no token may
        follow the answer itself.
        """
        taken, words = list(drafts), -(-len(self._free) // WORD)
        allowed = np.full((self._window, words), -1, np.int32)
        for row in range(len(taken) + 1):
            free = self._find_allowed_tokens([*self._output, *taken[:row]], self._taken + row)
            if not free.any():
                if row == 0:
                    raise _make_words_error("no token is left that may follow the answer")
                taken = taken[: row - 1]
                break
            bits = np.zeros(words * WORD, bool)
            bits[: len(free)] = free
            allowed[row] = np.packbits(bits, bitorder="little").view("<i4")
        self.kept = len(taken)
        return Constraint(taken, self.kept, allowed)

    def take(self, token: int) -> None:
        self._taken += 1
        self._output.append(token)
        del self._output[: -max(map(len, self._bad), default=1)]

    def _find_allowed_tokens(
        self, output: list[int], count: int
    ) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """Return the tokens [V] that may follow `count` tokens, the last of which are `output`."""
        free = self._before_min_tokens if count < self._min_tokens else self._free
        ends = [ids[-1] for ids in self._bad if output[1 - len(ids) :] == ids[:-1]]
        if not ends:
            return free
        free = free.copy()
        free[ends] = False
        return free


def encode_bad_word(text: str, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Return the tokens of a text, and of the text after a space if they are equally many."""
    assert tokenizer is not None
    text = text.lstrip() or text
    plain, spaced = (tokenizer.encode(t, add_special_tokens=False) for t in (text, f" {text}"))
    if not plain:
        raise _make_words_error("a text is empty")
    return [plain, spaced] if len(spaced) == len(plain) and spaced[0] != plain[0] else [plain]
