"""Tokenizers of SentencePiece's kind in GGUF files, beside its algorithm written out."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder.gguf.container import GgufFile
from mtpbuild.builder.gguf.tokenizer import make_tokenizer, tokenizer_files
from mtpbuild.runtime.text.tokenizer import Tokenizer, read_backend
from tests.support import model_tokenizers

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
SPECIAL = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "\n\n": USER, "<tool>": USER}
WORDS = ("the", "there", "other", "hen", "and", "sand", "an", "so", "son", "de", "é", "né", "ab")


def make_keys(prefix: bool) -> dict[str, Any]:
    """Return the keys of a vocabulary in which words have several ways to be put together."""
    types = SPECIAL | {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    letters = sorted({*"".join(WORDS)} | {SPACE})
    pieces = [word[:end] for word in WORDS for end in range(2, len(word) + 1)]
    pieces += [word[start:] for word in WORDS for start in range(1, len(word) - 1)]
    pieces += [SPACE + piece for piece in pieces] + [SPACE * 2, "  " * 2]
    random.Random(0).shuffle(pieces)
    types |= dict.fromkeys([*dict.fromkeys(pieces), *letters], NORMAL)
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*types], "tokenizer.ggml.token_type": [*types.values()],
        "tokenizer.ggml.scores": [-float(i) for i in range(len(types))],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }  # fmt: skip


def merge_best(text: str, ids: dict[str, int]) -> list[int]:
    """Join the neighbours whose token comes first in the vocabulary, until there are none."""
    symbols = [*text]
    while True:
        joined = [ids.get(a + b, len(ids)) for a, b in itertools.pairwise(symbols)]
        if not joined or (best := min(joined)) == len(ids):
            break
        at = joined.index(best)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    known = ([s] if s in ids else [f"<0x{b:02X}>" for b in s.encode()] for s in symbols)
    return [ids[symbol] for some in known for symbol in some]


@pytest.mark.parametrize("prefix", [False, True])
def test_words_are_sentencepieces(prefix: bool, tmp_path: Path) -> None:
    keys = make_keys(prefix)
    file = GgufFile(Path("a.gguf"), keys, {})
    files = dict(tokenizer_files(file, tmp_path, {}))
    assert '"add_bos_token": true' in files["tokenizer_config.json"]
    (tmp_path / "tokenizer.json").write_text(files["tokenizer.json"], encoding="utf-8")
    ours = Tokenizer(read_backend(tmp_path / "tokenizer.json"))
    ids = {token.replace(" ", SPACE): i for i, token in enumerate(keys["tokenizer.ggml.tokens"])}
    generator = random.Random(1)
    texts = [" ".join(generator.choices(WORDS, k=9)) for _ in range(40)]
    texts += [text.replace("\n\n", "") for text in model_tokenizers.TEXTS]
    texts += ["    so", "so  and   the", "日本\x00", "e\u0301", "a" + SPACE + "b"]
    for text in filter(None, texts):
        spelled = (SPACE if prefix else "") + text.replace(" ", SPACE)
        wanted = merge_best(spelled, ids)
        assert ours.encode(text) == wanted, text
        assert ours.text(wanted) == (" " if prefix else "") + text.replace(SPACE, " ")
    assert ours.encode("so\n\nan")[-2:] == [ids["\n\n"], ids["an"]] or prefix
    assert ours.text([ids["\n\n"], ids["<tool>"], ids["<s>"]]) == "\n\n<tool>"
    assert ours.spell("so <s>") != ours.encode("so <s>")
    assert ours.text(ours.spell("so <s>")) == "so <s>"


def test_a_tokenizer_of_other_scores_is_not_made() -> None:
    keys = make_keys(False) | {"tokenizer.ggml.model": "t5"}
    assert make_tokenizer(GgufFile(Path("a.gguf"), keys, {}), {}) is None
