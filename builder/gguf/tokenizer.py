"""The tokenizer's files, made from the keys of a GGUF file."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mtpbuild.builder.gguf.container import GgufFile
from mtpbuild.builder.gguf.header import Keys
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.text.tokenizer import SPACE, TOKENIZER
from mtpbuild.runtime.text.tokenizer_files import CHAT_TEMPLATE, TOKENIZER_CONFIG

AT = "tokenizer.ggml."
NORMAL, UNUSED = 1, 5  # types of tokens in the vocabulary; others are added ones
CONTROL, BYTE = 3, 6
SCORED = "llama"  # what GGUF calls SentencePiece's kind of tokenizers
# Ends the patterns that split texts into words.
WHITE_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}


@dataclass(frozen=True)
class WordSplit:
    """How a tokenizer splits texts into words, by patterns that are applied in turn."""

    patterns: tuple[str, ...]
    normalised: bool = False  # whether texts are brought to NFC before
    adds_bos: bool = False  # whether texts begin with BOS if no key says so
    whole_words: bool = False  # whether a word of the vocabulary is one token whatever the merges
    # Whether spaces and bytes are as in SentencePiece, and all added tokens are special.
    spaced: bool = False
    ends: tuple[str, ...] = ()  # tokens that end answers, beside those that keys name


WordSplits = Mapping[str, WordSplit]  # by the key tokenizer.ggml.pre


def split_words(letter: str, number: str = r"\p{N}") -> str:
    """Return a pattern of GPT-4's kind for this class of letters and these numbers."""
    return (
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letter}+|{number}"
        rf"| ?[^\s{letter.strip('[]')}\p{{N}}]+[\r\n]*|{WHITE_SPACE}"
    )


def tokenizer_files(file: GgufFile, beside: Path, splits: WordSplits) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the files beside a checkpoint's weights, as far as keys go.

    beside: a folder; no tokenizer is made if it has one.
    """
    keys, tokens = file.keys, file.texts(f"{AT}tokens")
    if tokens is None:
        return
    if not (beside / TOKENIZER).is_file() and (tokenizer := make_tokenizer(file, splits)):
        yield TOKENIZER, tokenizer.to_str()
    named = {
        f"{name}_token": tokens[number]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if type(number := keys.get(f"{AT}{key}_token_id")) is int and 0 <= number < len(tokens)
    }
    flags = {key: keys[AT + key] for key in ("add_bos_token", "add_eos_token") if AT + key in keys}
    split = splits.get(file.tokenizer)
    if keys.get(f"{AT}model") == SCORED or (split is not None and split.adds_bos):
        flags.setdefault("add_bos_token", True)  # as llama.cpp does
    if split is not None and split.spaced:
        flags["add_bos_token"] = True  # whatever the key says, as in llama.cpp
    config = {**named, **flags, "tokenizer_class": "PreTrainedTokenizerFast"}
    yield TOKENIZER_CONFIG, json.dumps(config, ensure_ascii=False)
    if isinstance(template := keys.get("tokenizer.chat_template"), str) and template:
        yield CHAT_TEMPLATE, template
    ends = [tokens.index(name) for name in (split.ends if split else ()) if name in tokens]
    yield "generation_config.json", json.dumps(make_generation_config(keys, ends))


def make_generation_config(keys: Keys, more: Sequence[int] = ()) -> dict[str, Any]:
    """Return the ids that begin and end texts, and the settings that the model's makers advise.

    more: ids that end texts, beside those that keys name.
    """
    ends = [*(keys.get(f"{AT}{name}_token_id") for name in ("eos", "eot", "eom")), *more]
    config: dict[str, Any] = {"eos_token_id": [*dict.fromkeys(i for i in ends if type(i) is int)]}
    if type(bos := keys.get(f"{AT}bos_token_id")) is int:
        config["bos_token_id"] = bos
    for key, name in SAMPLING.items():
        if isinstance(value := keys.get(f"general.sampling.{key}"), int | float):
            config |= {name: round(value, 6), "do_sample": True}
    return config


def make_tokenizer(file: GgufFile, splits: WordSplits) -> Tokenizer | None:
    """Make a BPE; None if it is of another kind, or its splitting is not known."""
    kind = file.keys.get(f"{AT}model")
    if kind == SCORED and isinstance(file.keys.get(f"{AT}scores"), list | memoryview):
        return make_scored_tokenizer(file)
    split = splits.get(file.tokenizer)
    if kind not in ("gpt2", file.tokenizer) or split is None or f"{AT}merges" not in file.keys:
        return None
    vocabulary = read_vocabulary(file)
    pairs = file.texts(f"{AT}merges") or []
    merges = [(left, right) for left, _, right in (pair.partition(" ") for pair in pairs)]
    if split.spaced:
        return make_spaced_tokenizer(file, vocabulary, merges, prefix=False, special=True)
    backend = make_bpe(file, vocabulary, merges, ignore_merges=split.whole_words)
    if split.normalised:
        backend.normalizer = normalizers.NFC()
    words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, bytes_])
    backend.decoder = decoders.ByteLevel()
    add_tokens(file, backend, vocabulary)
    return backend


def make_scored_tokenizer(file: GgufFile) -> Tokenizer:
    """Make a BPE of SentencePiece's kind: the order of tokens is that of merges, bytes are tokens.

    Scores fall with ids, but for tokens that makers put before the others, such as runs of spaces.
    """
    vocabulary = {token.replace(" ", SPACE): i for token, i in read_vocabulary(file).items()}
    merges = list[tuple[int, int, tuple[str, str]]]()
    for token, i in vocabulary.items():
        for middle in range(1, len(token)):
            left, right = token[:middle], token[middle:]
            if left in vocabulary and right in vocabulary:
                merges.append((i, -middle, (left, right)))
    pairs = [pair for *_, pair in sorted(merges)]
    return make_spaced_tokenizer(file, vocabulary, pairs, prefix=True, special=False)


def make_spaced_tokenizer(
    file: GgufFile,
    vocabulary: dict[str, int],
    pairs: list[tuple[str, str]],
    *,
    prefix: bool,
    special: bool,
) -> Tokenizer:
    """Make a BPE of SentencePiece's kind, which merges whole texts.

    prefix: whether they get a space before if no key says so. special: whether all added tokens
    are special, though files mark only those that llama.cpp hides.
    """
    unknown = file.keys.get(f"{AT}unknown_token_id")
    name = next((token for token, i in vocabulary.items() if i == unknown), None)
    backend = make_bpe(file, vocabulary, pairs, unk_token=name, fuse_unk=True, byte_fallback=True)
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    plain: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.keys.get(f"{AT}add_space_prefix", prefix):
        spaces.insert(0, normalizers.Prepend(SPACE))
        plain.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(plain)
    add_tokens(file, backend, vocabulary, special)
    return backend


def read_types(file: GgufFile, count: int) -> Sequence[int]:
    types = file.keys.get(f"{AT}token_type") or [NORMAL] * count
    if not isinstance(types, list | memoryview) or len(types) != count:
        raise CheckpointError(
            f"{file.path}: {AT}token_type has no type of each of {count} tokens: put a "
            f"{TOKENIZER} beside"
        )
    return types


def read_vocabulary(file: GgufFile) -> dict[str, int]:
    """Return the ids of tokens, without those that pad the vocabulary to the embedding's rows."""
    tokens = file.texts(f"{AT}tokens") or []
    types = read_types(file, len(tokens))
    return {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}


def make_bpe(
    file: GgufFile, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # the package raises its own, which has no class of its own
        raise CheckpointError(f"{file.path}: no usable merges ({error})") from None


def add_tokens(
    file: GgufFile, backend: Tokenizer, vocabulary: dict[str, int], special: bool = False
) -> None:
    """Tell a tokenizer which of its tokens are found in texts before all others."""
    types = read_types(file, len(file.texts(f"{AT}tokens") or []))
    backend.add_tokens(
        [
            AddedToken(token, special=special or types[i] == CONTROL, normalized=False)
            for token, i in vocabulary.items()
            if types[i] not in (NORMAL, BYTE) and token.strip(SPACE)
        ]
    )


def explain_unknown_split(file: GgufFile, splits: WordSplits) -> str | None:
    """Return why no tokenizer is made from the keys; None if one is, or if there are no tokens."""
    kind = str(file.keys.get(f"{AT}model"))
    known = file.tokenizer in splits if kind != SCORED else f"{AT}scores" in file.keys
    if f"{AT}tokens" not in file.keys or (kind in ("gpt2", SCORED, file.tokenizer) and known):
        return None
    return re.sub(r"\s+", " ", f"its tokenizer ({kind}, pre {file.tokenizer}) is not known")
