"""Reading of special tokens, added tokens and chat templates from the files beside tokenizer.json.

The precedence is that of transformers: tokenizer_config.json overrides tokenizer.json for a token,
and a template in its own file overrides one in tokenizer_config.json.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken

from mtpbuild.runtime import files
from mtpbuild.runtime.errors import EngineFileError, UsageError
from mtpbuild.runtime.text.chat_template import DEFAULT, ChatTemplates, TemplateText
from mtpbuild.runtime.text.template_pool import render_text
from mtpbuild.runtime.text.template_process import DONE

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"  # of older checkpoints
CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"  # a folder; a file's name is the template's

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

Config = dict[str, Any]
T = TypeVar("T")


def read_config(folder: Path, names: Collection[str]) -> Config | None:
    """Read tokenizer_config.json and an older special_tokens_map.json; None if both are missing."""
    config = _read_object(folder / TOKENIZER_CONFIG, names)
    older = _read_object(folder / SPECIAL_TOKENS_MAP, names)
    if older is None or "added_tokens_decoder" in (config or {}):
        return config
    return {**(config or {}), **older}


def special_tokens(config: Config) -> dict[str, str]:
    """Map names such as `bos_token`, and the model's own names, to special tokens."""
    tokens = {name: config.get(name) for name in NAMED}
    tokens |= {name: value for name, value in config.items() if name.endswith("_token")}
    if isinstance(extra := config.get("extra_special_tokens"), dict):
        tokens |= extra
    texts = {name: _read_text(value) for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if text is not None}


def add_tokens(backend: tokenizers.Tokenizer, config: Config) -> None:
    """Add the tokens that only the configuration has, and apply its flags to the others.

    A token is special if it has a name, or if it is marked as special in either file.
    """
    known = backend.get_added_tokens_decoder()
    listed = dict(_read_given_tokens(config)) or dict(known)
    named = special_tokens(config).values()
    special = {*named, *(token.content for token in known.values() if token.special)}
    tokens = [listed[id] for id in sorted(listed)]
    for token in tokens:
        token.special = token.special or token.content in special
    texts = {token.content for token in (*known.values(), *tokens)}
    new = (text for text in dict.fromkeys((*named, *_find_unnamed(config))) if text not in texts)
    tokens += [AddedToken(text, special=True) for text in new]
    flags = {
        token.content: _list_flags(token) for token in backend.get_added_tokens_decoder().values()
    }
    if changes := [token for token in tokens if flags.get(token.content) != _list_flags(token)]:
        backend.add_tokens(changes)


def read_template(path: Path) -> str:
    """Read a template that a user gives; raise UsageError if it can't be read or rendered."""
    try:
        text = files.read_text(path)
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(f"chat_template {path}: can't be read ({why})") from None
    except ValueError as error:
        raise UsageError(f"chat_template {path}: not text in UTF-8 ({error})") from None
    options = {"tools": None, "documents": None, "add_generation_prompt": True}
    messages = [{"role": "user", "content": "x"}]
    kind, said = render_text(text, {**dict.fromkeys(NAMED, ""), **options, "messages": messages})
    if kind != DONE:
        raise UsageError(f"chat_template {path}: does not render a question: {said}")
    return text


def chat_templates(
    folder: Path,
    names: Collection[str],
    config: Config,
    special: Mapping[str, str],
    path: Path | None = None,
) -> ChatTemplates | None:
    """Return the model's chat templates, or the one that is given; None if there are none."""
    if path is not None:
        sources = {DEFAULT: TemplateText(str(path), read_template(path))}
        return ChatTemplates(sources, special)
    sources = dict(_read_template_files(folder, names)) or dict(_read_configured_templates(config))
    return ChatTemplates(sources, special) if sources else None


def _read_template_files(
    folder: Path, names: Collection[str]
) -> Iterator[tuple[str, TemplateText]]:
    for file in sorted(names):
        parent, _, name = file.rpartition("/")
        if file == CHAT_TEMPLATE or (parent == MORE_TEMPLATES and name.endswith(".jinja")):
            text = _read(folder / file, files.read_text)
            yield name.removesuffix(".jinja") if parent else DEFAULT, TemplateText(file, text)


def _read_configured_templates(config: Config) -> Iterator[tuple[str, TemplateText]]:
    """Yield the templates in tokenizer_config.json: one text, or a list of names and texts."""
    templates = config.get("chat_template")
    if isinstance(templates, str):
        templates = [{"name": DEFAULT, "template": templates}]
    for entry in templates if isinstance(templates, list) else ():
        match entry:
            case {"name": str(name), "template": str(text)}:
                yield name, TemplateText(f"{TOKENIZER_CONFIG}: chat_template {name}", text)
            case _:
                raise EngineFileError(
                    f"{TOKENIZER_CONFIG}: a chat_template without name or template"
                )


def _read_given_tokens(config: Config) -> Iterator[tuple[int, AddedToken]]:
    """Yield the tokens of `added_tokens_decoder` by id, with their flags."""
    tokens = config.get("added_tokens_decoder")
    for id, token in tokens.items() if isinstance(tokens, dict) else ():
        try:
            flags = {name: token[name] for name in FLAGS if name in token}
            yield int(id), AddedToken(token["content"], **flags)
        except (TypeError, KeyError, ValueError):
            raise EngineFileError(
                f"{TOKENIZER_CONFIG}: added_tokens_decoder {id} is not a token"
            ) from None


def _find_unnamed(config: Config) -> Iterator[str]:
    """Yield the special tokens without names."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    for token in extra if isinstance(extra, list) else ():
        if (text := _read_text(token)) is not None:
            yield text


def _read_text(token: object) -> str | None:
    """Return the text of a token, which is a text or {"content": text}."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _list_flags(token: AddedToken) -> tuple[bool, ...]:
    return tuple(getattr(token, name) for name in FLAGS)


def _read_object(path: Path, names: Collection[str]) -> Config | None:
    if path.name not in names:
        return None
    config = _read(path, files.read_json)
    if not isinstance(config, dict):
        raise EngineFileError(f"{path}: not a JSON object")
    return config


def _read(path: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(path)
    except OSError as error:
        raise EngineFileError(f"{path}: can't be read ({error.strerror})") from None
    except ValueError as error:
        kind = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
        raise EngineFileError(f"{path}: not {kind} ({error})") from None
