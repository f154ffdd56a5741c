"""The vocabulary for llguidance: special tokens are not text, and text is never a special token."""

from collections.abc import Iterator, Sequence

from mtpbuild.runtime.tokenizer import Tokenizer


class GrammarTokens:
    """A tokenizer for grammars, with the interface of llguidance's `TokenizerWrapper`.

    Marks are special tokens and added tokens that look like `<this>`. A grammar names them as
    `<this>` or by id. The same characters in a form's text are spelled with ordinary tokens.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        """Read the vocabulary; ends: the tokens that end an answer."""
        self._tokenizer = tokenizer
        self.eos_token_id = end_ids[0]
        marks = dict(self._marks())
        texts = [b"" if id in marks else tokenizer.token_bytes(id) for id in range(vocab_size)]
        self.special_token_ids = [id for id, text in enumerate(texts) if not text]
        for id in self.special_token_ids:  # the model's vocabulary may be padded
            texts[id] = marks.get(id, f"<[{id}]>").encode()
        self.tokens = texts

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.spell(text)

    def _marks(self) -> Iterator[tuple[int, str]]:
        for text, id in self._tokenizer.added_tokens.items():
            if not self._tokenizer.token_bytes(id) or (text[:1], text[-1:]) == ("<", ">"):
                yield id, text
