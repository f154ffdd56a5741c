"""Find the token ids that begin and end texts and thoughts, in files beside the weights."""

from dataclasses import dataclass
from pathlib import Path

from mtpbuild.builder.checkpoint.config import ModelConfig
from mtpbuild.builder.checkpoint.readable import read_object
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.files import MOST_TOKENIZER, read_json
from mtpbuild.runtime.text.tokenizer import TOKENIZER
from mtpbuild.runtime.text.tokenizer_files import TOKENIZER_CONFIG, special_tokens


@dataclass(frozen=True)
class GenerationIds:
    """The token ids, under the names of the fields in an engine's manifest."""

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    thinking_token_ids: tuple[int, int] | None


def read_generation_ids(folder: Path, config: ModelConfig) -> GenerationIds:
    """Read the ids of a checkpoint folder; raise CheckpointError for invalid ones.

    generation_config.json wins over config.json. The tokenizer's EOS is added to the list, since
    Qwen3.5's config.json names another token than the one that ends the turns of its chats.
    """

    def first(key: str) -> tuple[int, ...]:
        files = (folder / "generation_config.json", folder / "config.json")
        per_file = (_read_ids(file, key, config.vocab_size) for file in files)
        return next((ids for ids in per_file if ids is not None), ())

    bos, eos, added = first("bos_token_id"), first("eos_token_id"), _read_added_tokens(folder)
    special = special_tokens(read_object(folder / TOKENIZER_CONFIG))
    tokenizer_eos = added.get(special.get("eos_token", ""))
    if tokenizer_eos is not None and tokenizer_eos < config.vocab_size:
        eos = tuple(dict.fromkeys((*eos, tokenizer_eos)))
    thinks = {"<think>", "</think>"} <= added.keys()
    thinking = (added["<think>"], added["</think>"]) if thinks else None
    return GenerationIds(next(iter(bos), None), eos, thinking)


def _read_added_tokens(folder: Path) -> dict[str, int]:
    """Return the ids of the tokens that tokenizer.json adds to its vocabulary, by their text."""
    try:
        raw = read_json(folder / TOKENIZER, MOST_TOKENIZER)
        return {token["content"]: int(token["id"]) for token in raw["added_tokens"]}
    except (OSError, ValueError, KeyError, TypeError):  # the runtime reports it
        return {}


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
