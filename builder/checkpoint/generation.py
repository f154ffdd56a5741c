"""Find the token ids that begin and end texts and thoughts, in files beside the weights."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpbuild.builder.checkpoint.config import ModelConfig
from mtpbuild.builder.checkpoint.readable import read_object
from mtpbuild.builder.checkpoint.side_files import CONFIG
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.files import MAX_TOKENIZER, read_json
from mtpbuild.runtime.text import tokenizer_files
from mtpbuild.runtime.text.thought_marks import THOUGHT_MARKS
from mtpbuild.runtime.text.tokenizer import TOKENIZER


@dataclass(frozen=True)
class GenerationIds:
    """The token ids, under the names of the fields in an engine's manifest."""

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    thinking_token_ids: tuple[int, int] | None


def read_generation_ids(folder: Path, config: ModelConfig) -> GenerationIds:
    """Read the ids of a checkpoint folder; raise CheckpointError for invalid ones.

    generation_config.json wins over config.json. The tokenizer's EOS is added to the list, since
    Qwen3.5's config.json names another token than the one that ends the turns of its chats. Of its
    files special_tokens_map.json is the older one, which transformers prefers unless
    tokenizer_config.json lists added tokens.
    """

    def first(key: str) -> tuple[int, ...]:
        files = (folder / "generation_config.json", folder / CONFIG)
        per_file = (_read_ids(file, key, config.vocab_size) for file in files)
        return next((ids for ids in per_file if ids is not None), ())

    tokenizer_config = read_object(folder / tokenizer_files.TOKENIZER_CONFIG)
    listed = tokenizer_config.get("added_tokens_decoder")
    bos, eos, ids = first("bos_token_id"), first("eos_token_id"), _read_token_ids(folder, listed)
    newer = tokenizer_files.special_tokens(tokenizer_config)
    older = tokenizer_files.special_tokens(read_object(folder / tokenizer_files.SPECIAL_TOKENS_MAP))
    special = older | newer if listed else newer | older
    tokenizer_eos = ids.get(special.get("eos_token", ""))
    if isinstance(tokenizer_eos, int) and 0 <= tokenizer_eos < config.vocab_size:
        eos = tuple(dict.fromkeys((*eos, tokenizer_eos)))
    marks = next((m for m in THOUGHT_MARKS if {m.begin, m.end} <= ids.keys()), None)
    thinking = (ids[marks.begin], ids[marks.end]) if marks else None
    return GenerationIds(next(iter(bos), None), eos, thinking)


def _read_token_ids(folder: Path, listed: Any) -> dict[str, int]:
    """Return the ids of tokens by their text: of the vocabulary, and of those that are added to it.

    listed: the `added_tokens_decoder` of tokenizer_config.json.
    """
    ids = dict[str, int]()
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # the runtime says it
        ids |= {token["content"]: int(id) for id, token in (listed or {}).items()}
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        raw = read_json(folder / TOKENIZER, MAX_TOKENIZER)
        vocabulary = raw.get("model", {}).get("vocab")
        ids = (vocabulary if isinstance(vocabulary, dict) else {}) | ids
        ids |= {token["content"]: int(token["id"]) for token in raw["added_tokens"]}
    return ids


def _read_ids(path: Path, key: str, vocab_size: int) -> tuple[int, ...] | None:
    """Return the ids under a key of a file, or None if file or key is missing."""
    if not path.exists():
        return None
    try:
        raw = read_json(path)
        value = raw.get(key, raw.get("text_config", {}).get(key))
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a JSON object ({error})") from None
    if value is None:
        return None
    ids = tuple(value) if isinstance(value, list) else (value,)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise CheckpointError(f"{path}: {key} {token!r} is not a token id below {vocab_size}")
    return ids
