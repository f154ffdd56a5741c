"""The vocabulary as llguidance asks for it: marks are no text, and no text becomes a mark."""

from collections.abc import Iterator, Sequence

from mtpbuild.runtime.tokenizer import Tokenizer


class GrammarTokens:
    """A tokenizer for grammars, in the shape of llguidance's `TokenizerWrapper`.

    Marks are special tokens and those that look like `<this>`. A grammar names them by `<this>` or
    by their ids; where a form holds the same text, it is spelled with ordinary tokens.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        """ends: the tokens that end an answer."""
        self._tokenizer = tokenizer
        self.eos_token_id = ends[0]
        marks = dict(self._marks())
        texts = [b"" if id in marks else tokenizer.token_bytes(id) for id in range(vocab_size)]
        self.special_token_ids = [id for id, text in enumerate(texts) if not text]
        for id in self.special_token_ids:  # some stand for nothing: the model's vocabulary is wider
            texts[id] = marks.get(id, f"<[{id}]>").encode()
        self.tokens = texts

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.spell(text)

    def _marks(self) -> Iterator[tuple[int, str]]:
        for text, id in self._tokenizer.added_tokens.items():
            if not self._tokenizer.token_bytes(id) or (text[:1], text[-1:]) == ("<", ">"):
                yield id, text
