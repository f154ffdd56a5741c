"""A reduced vocabulary for drafts: only the head's rows of frequent tokens are used for them.

The main model judges drafts with its whole vocabulary, so the text stays exact. A draft is rejected
where the text has a token outside the reduced vocabulary. The idea is FR-Spec's (Zhao et al.,
2025); SGLang's flag for it is `--speculative-token-map`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtpbuild.runtime.checks import in_range
from mtpbuild.runtime.errors import UsageError, explain_missing_package
from mtpbuild.runtime.files import MAX_TOKENIZER, read_json
from mtpbuild.runtime.text.tokenizer import TOKENIZER

FLAG = "--draft-vocab"
DRAFT_VOCAB = "draft_vocab.json"  # in an engine's folder


def draft_ids(asked: str, checkpoint: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of the reduced vocabulary, in rising order; raise UsageError.

    asked: a number of tokens, or a file of ids: JSON, one id a line, or SGLang's token map (.pt).
    """
    if asked.isdecimal():
        count = in_range(int(asked), 1, vocab_size - 1, FLAG)
        ids = list(list_most_frequent(checkpoint / TOKENIZER, vocab_size))[:count]
        if len(ids) < count:
            raise UsageError(f"{FLAG} {count}: {checkpoint / TOKENIZER} has {len(ids)} tokens")
    else:
        ids = read_ids(Path(asked))
    for id in ids:
        if type(id) is not int or not 0 <= id < vocab_size:
            raise UsageError(f"{FLAG} {asked}: {id!r} is not a token id below {vocab_size}")
    distinct = tuple(sorted(set(ids)))
    if not 0 < len(distinct) < vocab_size:
        raise UsageError(f"{FLAG} {asked}: names {len(distinct)} of {vocab_size} tokens")
    return distinct


def write_draft_ids(ids: tuple[int, ...], folder: Path) -> None:
    """Write the ids that drafts are chosen from into an engine's folder, if they are reduced."""
    if ids:
        (folder / DRAFT_VOCAB).write_text(json.dumps(ids) + "\n", encoding="utf-8")


def list_most_frequent(path: Path, vocab_size: int) -> Iterator[int]:
    """Yield the ids of a BPE tokenizer: added tokens first, then the others by frequency.

    Added tokens end texts and thoughts. Training a BPE merges the most frequent pair first, so the
    order of merges is that of frequency. Single bytes come before all merges.
    """
    try:
        raw = read_json(path, MAX_TOKENIZER)
        vocab, merges = raw["model"]["vocab"], raw["model"]["merges"]
        added = [int(token["id"]) for token in raw["added_tokens"]]
        pairs = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in merges)
        merged = {left + right: i for i, (left, right) in reversed([*enumerate(pairs)])}
        ranked = sorted(vocab, key=lambda entry: (merged.get(entry, -1), vocab[entry]))
    except FileNotFoundError:
        raise UsageError(f"{FLAG}: needs a file of token ids, {path} is not there") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{FLAG}: {path} is no BPE tokenizer ({error!r})") from None
    ids = dict.fromkeys([*added, *(vocab[entry] for entry in ranked)])
    return (id for id in ids if id < vocab_size)


def read_ids(path: Path) -> list[Any]:
    """Read the ids in a file, in its order."""
    try:
        if path.suffix == ".pt":
            with explain_missing_package("--draft-vocab", "build", "torch"):
                import torch
            ids: list[Any] = torch.load(path, weights_only=True).flatten().tolist()
            return ids
        text = path.read_text(encoding="utf-8")
        read = json.loads(text) if text.lstrip().startswith("[") else [*map(int, text.split())]
        return read if isinstance(read, list) else [read]
    except OSError as error:
        raise UsageError(f"{FLAG} {path}: neither a number nor a file ({error.strerror})") from None
    except Exception as error:  # torch.load raises many kinds for files that are not its own
        raise UsageError(f"{FLAG} {path}: no list of token ids ({error})") from None
