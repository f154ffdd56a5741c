"""The engine's tokenizer: text to token ids, a token's bytes, and the chat template."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from tokenizers.decoders import ByteLevel

from mtpbuild.runtime.errors import EngineFileError, RequestError
from mtpbuild.runtime.manifest import Manifest

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"

Message = Mapping[str, Any]  # {"role": ..., "content": ...}


class Tokenizer:
    """A byte-level tokenizer, as all DeepSeek models have: every token stands for some bytes."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        bos_token: str = "",
        eos_token: str = "",
        add_bos: bool = False,
    ) -> None:
        """add_bos: put the BOS before a text even if the backend doesn't."""
        self._backend = backend
        self.chat_template = chat_template
        self.bos_token, self.eos_token = bos_token, eos_token
        bos = backend.token_to_id(bos_token) if add_bos else None
        self._bos = [] if bos is None else [bos]
        added = backend.get_added_tokens_decoder()
        self._bytes = {id: b"" for id, token in added.items() if token.special}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; the BOS is not added to a text that begins with it."""
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(f"the prompt is not valid Unicode text ({error})") from None
        if self.bos_token and text.startswith(self.bos_token):
            add_special_tokens = False
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self._bos + ids if add_special_tokens and ids[:1] != self._bos else ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the text: none for a special or unknown one."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = _spelled(self._backend.id_to_token(token) or "")
        return found

    def special_name(self, token: int) -> str | None:
        """The name of a token that adds nothing to the text; None for any other."""
        if self.token_bytes(token):
            return None
        return self._backend.id_to_token(token) or f"<{token}>"

    def chat_prompt(self, messages: Sequence[Message]) -> str:
        """The text that asks for the next answer in a conversation.

        Raises RequestError for messages that the template refuses, or if there is no template.
        """
        if self.chat_template is None:
            raise RequestError(f"this engine has no {CHAT_TEMPLATE}: give a plain prompt")
        from jinja2 import TemplateSyntaxError  # 30 ms, only for those who chat

        try:
            template = _environment().from_string(self.chat_template)
        except TemplateSyntaxError as error:
            where = f"{CHAT_TEMPLATE}: line {error.lineno}"
            raise EngineFileError(f"{where}: {error.message}; rebuild the engine") from None
        try:
            text: str = template.render(
                messages=messages,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
                add_generation_prompt=True,
            )
        except Exception as error:  # a template is a program: it can fail in any way
            raise RequestError(f"the chat template refuses these messages: {error}") from None
        return text


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """A tokenizer.json that the run time can decode; raises ValueError that names the file."""
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ValueError(f"{path}: not a tokenizer ({error})") from None
    if not isinstance(backend.decoder, ByteLevel):
        kind = type(backend.decoder).__name__
        raise ValueError(f"{path}: decoder {kind}; only byte-level tokenizers are supported")
    return backend


def load_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer | None:
    """The tokenizer of an engine that was checked; None if it was built without one.

    Raises EngineFileError for a file that can't be used.
    """
    if TOKENIZER not in manifest.files:
        return None
    try:
        backend = read_backend(folder / TOKENIZER)
    except ValueError as error:
        raise EngineFileError(f"{error}; rebuild the engine") from None
    config = _read_config(folder, manifest)
    model = manifest.model
    eos = model.eos_token_ids[0] if model.eos_token_ids else None
    return Tokenizer(
        backend,
        chat_template=_read(folder / CHAT_TEMPLATE, manifest),
        bos_token=_special_token(backend, config, "bos_token", model.bos_token_id),
        eos_token=_special_token(backend, config, "eos_token", eos),
        add_bos=config.get("add_bos_token") is True,
    )


def _special_token(
    backend: tokenizers.Tokenizer, config: dict[str, Any], name: str, id: int | None
) -> str:
    """Finds a token in tokenizer_config.json, a text or {"content": text}; else the model's own."""
    given = config.get(name)
    token = given.get("content") if isinstance(given, dict) else given
    if isinstance(token, str) and backend.token_to_id(token) is not None:
        return token
    return (backend.id_to_token(id) or "") if id is not None and 0 <= id < 2**32 else ""


def _read_config(folder: Path, manifest: Manifest) -> dict[str, Any]:
    path = folder / TOKENIZER_CONFIG
    text = _read(path, manifest)
    try:
        config = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineFileError(f"{path}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise EngineFileError(f"{path}: not a JSON object; rebuild the engine")
    return config


def _read(path: Path, manifest: Manifest) -> str | None:
    """The text of one of the engine's files; None if it has no such file."""
    try:
        return path.read_text(encoding="utf-8") if path.name in manifest.files else None
    except UnicodeDecodeError as error:
        raise EngineFileError(f"{path}: not UTF-8 ({error})") from None


def _environment() -> Any:
    """Jinja as transformers sets it up for chat templates."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: each byte has a printable character that stands for it in a vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE = _byte_of_char()


def _spelled(token: str) -> bytes:
    """A vocabulary entry's bytes; one with a character outside the alphabet is plain text."""
    try:
        return bytes(_BYTE[char] for char in token)
    except KeyError:
        return token.encode()
