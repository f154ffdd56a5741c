"""The tokenizer's files, made from the keys of a GGUF file."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mtpbuild.builder.gguf.container import GgufFile
from mtpbuild.builder.gguf.header import Keys
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.text.tokenizer import TOKENIZER
from mtpbuild.runtime.text.tokenizer_files import CHAT_TEMPLATE, TOKENIZER_CONFIG

AT = "tokenizer.ggml."
NORMAL, UNUSED = 1, 5  # types of tokens in the vocabulary; others are added ones
CONTROL = 3
# How texts are split into words, by `tokenizer.ggml.pre`; with NFC if they are normalised.
_contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_spaces = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_qwen = (
    rf"{_contractions}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_spaces}"
)
_qwen35 = (
    rf"{_contractions}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_spaces}"
)
_glm = _qwen.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_deepseek = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_spaces}",
)
SPLITS: dict[str, tuple[tuple[str, ...], bool]] = {
    "qwen2": ((_qwen,), True),
    "qwen35": ((_qwen35,), True),
    "deepseek-v3": (_deepseek, False),
    "glm4": ((_glm,), False),
    "chatglm-bpe": ((_glm,), False),
}
SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}


def tokenizer_files(file: GgufFile, beside: Path) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the files beside a checkpoint's weights, as far as keys go.

    beside: a folder; no tokenizer is made if it has one.
    """
    keys, tokens = file.keys, file.texts(f"{AT}tokens")
    if tokens is None:
        return
    if not (beside / TOKENIZER).is_file() and (made := make_tokenizer(file)) is not None:
        yield TOKENIZER, made.to_str()
    named = {
        f"{name}_token": tokens[number]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if type(number := keys.get(f"{AT}{key}_token_id")) is int and 0 <= number < len(tokens)
    }
    flags = {key: keys[AT + key] for key in ("add_bos_token", "add_eos_token") if AT + key in keys}
    config = {**named, **flags, "tokenizer_class": "PreTrainedTokenizerFast"}
    yield TOKENIZER_CONFIG, json.dumps(config, ensure_ascii=False)
    if isinstance(template := keys.get("tokenizer.chat_template"), str) and template:
        yield CHAT_TEMPLATE, template
    yield "generation_config.json", json.dumps(generation(keys))


def generation(keys: Keys) -> dict[str, Any]:
    """Return the ids that begin and end texts, and the settings that the model's makers advise."""
    ends = (keys.get(f"{AT}{name}_token_id") for name in ("eos", "eot", "eom"))
    found: dict[str, Any] = {"eos_token_id": [*dict.fromkeys(i for i in ends if type(i) is int)]}
    if type(bos := keys.get(f"{AT}bos_token_id")) is int:
        found["bos_token_id"] = bos
    for key, name in SAMPLING.items():
        if isinstance(value := keys.get(f"general.sampling.{key}"), int | float):
            found |= {name: round(value, 6), "do_sample": True}
    return found


def make_tokenizer(file: GgufFile) -> Tokenizer | None:
    """Make a byte-level BPE; None if it is of another kind, or its splitting is not known."""
    keys = file.keys
    split = SPLITS.get(str(keys.get(f"{AT}pre")))
    if keys.get(f"{AT}model") != "gpt2" or split is None or f"{AT}merges" not in keys:
        return None
    tokens, pairs = file.texts(f"{AT}tokens") or [], file.texts(f"{AT}merges") or []
    types = keys.get(f"{AT}token_type") or [NORMAL] * len(tokens)
    if not isinstance(types, list | memoryview) or len(types) != len(tokens):
        raise CheckpointError(
            f"{file.path}: {AT}token_type has no type of each of {len(tokens)} tokens: put a "
            f"{TOKENIZER} beside"
        )
    patterns, normalised = split
    # Unused tokens, which pad the vocabulary to the embedding's rows, are in no tokenizer.
    kept = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    merges = [_split_pair(merge) for merge in pairs]
    try:
        backend = Tokenizer(models.BPE(vocab=kept, merges=merges))
    except Exception as error:  # the package raises its own, which has no class of its own
        raise CheckpointError(f"{file.path}: no usable merges ({error})") from None
    if normalised:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
    backend.decoder = decoders.ByteLevel()
    added = (token for token in kept if types[kept[token]] not in (NORMAL, UNUSED))
    backend.add_tokens(
        [
            AddedToken(token, special=types[kept[token]] == CONTROL, normalized=False)
            for token in added
        ]
    )
    return backend


def _split_pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def explain_unknown_split(file: GgufFile) -> str | None:
    """Return why no tokenizer is made from the keys; None if one is, or if there are no tokens."""
    kind, pre = (str(file.keys.get(AT + key)) for key in ("model", "pre"))
    if f"{AT}tokens" not in file.keys or (kind == "gpt2" and pre in SPLITS):
        return None
    return re.sub(r"\s+", " ", f"its tokenizer ({kind}, pre {pre}) is not known")
