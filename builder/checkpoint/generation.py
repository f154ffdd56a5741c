"""Finds the token ids that begin and end a text, in generation_config.json or config.json."""

import json
from dataclasses import dataclass
from pathlib import Path

from mtpbuild.builder.models.config import ModelConfig
from mtpbuild.runtime.errors import CheckpointError


@dataclass(frozen=True)
class GenerationIds:
    """Holds the ids, under the names of the fields in an engine's manifest."""

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    thinking_token_ids: tuple[int, int] | None


def generation_ids(folder: Path, config: ModelConfig) -> GenerationIds:
    """Reads the ids; the first file that has one wins. Raises CheckpointError for wrong ids."""

    def first(key: str) -> tuple[int, ...]:
        files = (folder / "generation_config.json", folder / "config.json")
        found = (_ids(file, key, config.vocab_size) for file in files)
        return next((ids for ids in found if ids is not None), ())

    bos, eos = first("bos_token_id"), first("eos_token_id")
    return GenerationIds(next(iter(bos), None), eos, _thinking_ids(folder))


def _thinking_ids(folder: Path) -> tuple[int, int] | None:
    """Returns the ids of <think> and </think> if the tokenizer has a token for each."""
    try:
        raw = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        ids = {token["content"]: int(token["id"]) for token in raw["added_tokens"]}
    except (OSError, ValueError, KeyError, TypeError):  # the run time reports it
        return None
    begin, end = ids.get("<think>"), ids.get("</think>")
    return None if begin is None or end is None else (begin, end)


def _ids(path: Path, key: str, vocab_size: int) -> tuple[int, ...] | None:
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
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
