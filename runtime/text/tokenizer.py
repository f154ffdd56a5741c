"""The engine's tokenizer: token ids of texts, bytes of tokens, and prompts of conversations."""

import re
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol, Unpack

import tokenizers
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.errors import EngineFileError, RequestError, UsageError
from mtpbuild.runtime.files import MAX_TOKENIZER, check_regular
from mtpbuild.runtime.text import tokenizer_files
from mtpbuild.runtime.text.chat_template import ChatOptions, ChatTemplates, Message
from mtpbuild.runtime.text.thought_marks import THOUGHT_MARKS, THOUGHT_TOKENS
from mtpbuild.runtime.text.tokenizer_files import CHAT_TEMPLATE

TOKENIZER = "tokenizer.json"
LONG = 16 * 1024  # characters of a long text, or of a piece of it
SPACE = "\u2581"  # stands for a space in SentencePiece's tokens
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
SPARSE = 8  # characters per allowed token, above which a text is checked piece by piece


class ModelIds(Protocol):
    """The fields of a manifest or a checkpoint that a tokenizer without a configuration needs."""

    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class Tokenizer:
    """A tokenizer whose tokens stand for bytes, in GPT-2's spelling or in SentencePiece's.

    `chat_template` is the model's, if it has one; `bos_token` the text of its BOS.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: ChatTemplates | None = None,
        bos_token: str = "",
        add_bos: bool = False,
    ) -> None:
        """Wrap a backend; bos_token: a text that begins with it gets no second BOS.

        add_bos: whether to put it before a text even if the backend does not.
        """
        bos = backend.token_to_id(bos_token) if add_bos else None
        self._bos = [] if bos is None else [bos]
        self._backend = backend
        self.chat_template = chat_template
        self.bos_token = bos_token
        self._bytes = dict(_read_added_bytes(backend))
        self._decode = _decode_piece if _has_byte_tokens(backend) else _decode_spelling

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; a text that begins with the BOS gets no second BOS."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not valid Unicode text ({error})") from None
        if self.bos_token and text.startswith(self.bos_token):
            add_special_tokens = False
        if len(text) < LONG:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:  # a batch lets other threads run
            (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return self._bos + ids if add_special_tokens and ids[:1] != self._bos else ids

    def exceeds(self, text: str, count: int) -> bool:
        """Tell whether a text certainly has more than `count` tokens.

        The work grows with the count, not with the text. The pieces of a text have about as many
        tokens as the whole text. If they have more than twice `count` tokens, the whole text has
        more than `count`.
        """
        if len(text) > count * self.longest:
            return True
        if len(text) <= count * SPARSE:
            return False
        tokens = 0
        for begin in range(0, len(text), LONG):
            tokens += len(self.encode(text[begin : begin + LONG], add_special_tokens=False))
            if tokens > 2 * count:
                return True
        return False

    @cached_property
    def longest(self) -> int:
        """The largest number of characters in one token."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)  # a letter stands for a byte
        longest = max(map(len, vocabulary), default=1)
        return longest if self._backend.normalizer is None else 4 * longest  # NFC joins characters

    @property
    def added_tokens(self) -> dict[str, int]:
        """The ids of the tokens that were added to the vocabulary, by their text."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: id for id, token in added.items()}

    def decode_token(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text: none for a special or unknown token."""
        raw = self._bytes.get(token)
        if raw is None:
            raw = self._bytes[token] = self._decode(self._backend.id_to_token(token) or "")
        return raw

    def find_special_name(self, token: int) -> str | None:
        """Return the name of a token that adds nothing to the text; None for any other token."""
        if self.decode_token(token):
            return None
        return self._backend.id_to_token(token) or f"<{token}>"

    def find_thought_word(self, begin: int) -> str:
        """Return the word that belongs to the token that begins a thought; "" if none does."""
        name = self._backend.id_to_token(begin)
        return next((marks.word for marks in THOUGHT_MARKS if marks.begin == name), "")

    @property
    def special_ids(self) -> dict[str, int]:
        """The ids of the special tokens that were added to the vocabulary, by name."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: id for id, token in added.items() if token.special}

    def spell(self, text: str) -> list[int]:
        """Return `text` as ordinary tokens, even if it contains the names of added tokens."""
        split = self._backend.pre_tokenizer
        if _has_byte_tokens(self._backend):
            text = text.replace(" ", SPACE)
        pieces = [piece for piece, _ in split.pre_tokenize_str(text)] if split else [text]
        return [token.id for piece in pieces for token in self._backend.model.tokenize(piece)]

    def rstrip(self, ids: Sequence[int]) -> list[int]:
        """Return the ids without trailing tokens of white space."""
        end = len(ids)
        while end and (raw := self.decode_token(ids[end - 1])) and not raw.strip():
            end -= 1
        return list(ids[:end])

    @cached_property
    def answer_head(self) -> list[int]:
        """The tokens that the chat template puts before an answer; [] if unknown."""
        question = [{"role": "user", "content": "a"}]
        try:
            without = self.chat_prompt(question, add_generation_prompt=False)
            opened = self.chat_prompt(question)
        except (RequestError, EngineFileError):
            return []
        marks = "|".join(map(re.escape, THOUGHT_TOKENS))
        head = re.split(marks, opened.removeprefix(without))[0]
        known = opened.startswith(without) and head
        return self.rstrip(self.encode(head, add_special_tokens=False)) if known else []

    def text(self, ids: Sequence[int], shown: Sequence[int] = ()) -> str:
        """Return the text of tokens, with the names of the special tokens in `shown`."""
        names = {id: (self.find_special_name(id) or "").encode() for id in shown}
        raw = b"".join(self.decode_token(id) or names.get(id, b"") for id in ids)
        return raw.decode("utf-8", "replace")

    def chat_prompt(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
        """Return the prompt for the next answer in a conversation; see `ChatOptions`.

        Raises RequestError if there is no template, or if the template refuses the messages.
        """
        if self.chat_template is None:
            raise RequestError(f"this engine has no {CHAT_TEMPLATE}: give a plain prompt")
        return self.chat_template.render(messages, **options)


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer.json whose tokens stand for bytes; raise ValueError that names the file."""
    try:
        check_regular(path, MAX_TOKENIZER)
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ValueError(f"{path}: not a tokenizer ({error})") from None
    if not isinstance(backend.decoder, ByteLevel) and not _has_byte_tokens(backend):
        kind = type(backend.decoder).__name__
        raise ValueError(
            f"{path}: decoder {kind} is not supported; supported: ByteLevel, or a BPE with "
            "byte_fallback"
        )
    return backend


def _has_byte_tokens(backend: tokenizers.Tokenizer) -> bool:
    """Return whether tokens are spelled as SentencePiece does: with a mark for a space."""
    return isinstance(backend.model, BPE) and backend.model.byte_fallback


def load_tokenizer(
    folder: Path, manifest: Manifest, chat_template: Path | None = None
) -> Tokenizer | None:
    """Load the tokenizer of a checked engine; None if the engine was built without one.

    chat_template: a file in place of the engine's templates. Raises EngineFileError for a file that
    cannot be used, UsageError for that one.
    """
    try:
        return read_tokenizer(folder, manifest.files, manifest.model, chat_template)
    except EngineFileError as error:
        raise EngineFileError(f"{error}; rebuild the engine") from None


def read_tokenizer(
    folder: Path, files: Collection[str], model: ModelIds, chat_template: Path | None = None
) -> Tokenizer | None:
    """Do what `load_tokenizer` does for these of a folder's files, which may be a checkpoint's."""
    if TOKENIZER not in files:
        if chat_template is not None:
            raise UsageError(f"chat_template {chat_template}: this engine has no {TOKENIZER}")
        return None
    try:
        backend = read_backend(folder / TOKENIZER)
    except ValueError as error:
        raise EngineFileError(str(error)) from None
    stored = tokenizer_files.read_config(folder, files)
    config = stored or {}
    tokenizer_files.add_tokens(backend, config)
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    backend.no_truncation()  # a tokenizer.json may have kept the settings of training
    backend.no_padding()
    special = tokenizer_files.special_tokens(config)
    model_tokens = _find_own_tokens(backend, model)
    templates = tokenizer_files.chat_templates(
        folder, files, config, model_tokens if stored is None else special, chat_template
    )
    bos = special.get("bos_token") or model_tokens.get("bos_token", "")
    # transformers 5 ignores this key; 4 and llama.cpp read it, and DeepSeek relies on it alone.
    add_bos = config.get("add_bos_token") is True
    return Tokenizer(backend, chat_template=templates, bos_token=bos, add_bos=add_bos)


def _find_own_tokens(backend: tokenizers.Tokenizer, model: ModelIds) -> dict[str, str]:
    """Return BOS and EOS by the model's ids, for a tokenizer without a configuration."""
    ids = {"bos_token": model.bos_token_id, "eos_token": next(iter(model.eos_token_ids), None)}
    valid = {name: id for name, id in ids.items() if id is not None and 0 <= id < 2**32}
    return {name: backend.id_to_token(id) or "" for name, id in valid.items()}


def _read_added_bytes(backend: tokenizers.Tokenizer) -> Iterator[tuple[int, bytes]]:
    """Yield the bytes of the tokens that were added to the vocabulary; special tokens have none.

    Other added tokens are plain text, even if all their characters are in GPT-2's alphabet. A token
    that is also in the vocabulary may be a byte, so it is decoded like the rest.
    """
    for id, token in backend.get_added_tokens_decoder().items():
        if token.special:
            yield id, b""
        elif backend.model.token_to_id(token.content) is None:
            yield id, token.content.encode()


def _map_chars_to_bytes() -> dict[str, int]:
    """Return GPT-2's alphabet, in which a printable character stands for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE = _map_chars_to_bytes()


def _decode_piece(token: str) -> bytes:
    """Return the bytes of SentencePiece's token: a byte by its number, or a text."""
    if byte := BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(SPACE, " ").encode()


def _decode_spelling(token: str) -> bytes:
    """Return the bytes of a token; a token with characters outside the alphabet is plain text."""
    try:
        return bytes(_BYTE[char] for char in token)
    except KeyError:
        return token.encode()
