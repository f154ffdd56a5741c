"""GGUF files of Llama, Qwen2 and Qwen3 are read as the checkpoints that they were made from."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tokenizers
import torch
from tokenizers import pre_tokenizers

from mtpbuild.builder.gguf.container import GgufFile
from mtpbuild.builder.gguf.tokenizer import make_tokenizer
from mtpbuild.builder.models import find_family, load_config
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.builder.weights.gguf_folder import list_splits
from mtpbuild.runtime.errors import CheckpointError
from tests.support import model_tokenizers
from tests.support.dense_gguf import write_dense
from tests.support.families import make_config, make_family

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
EPS = 2**-17  # a file has it in fp32
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": EPS, "rope_scaling": LLAMA3},
    "qwen2": {"rms_norm_eps": EPS},
    "qwen3": {
        "rms_norm_eps": EPS,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": 1000000},
    },
}


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def llama3_factors(theta: float, width: int, factor: float) -> npt.NDArray[np.float32]:
    """Compute what converters store: one factor per pair, by which frequencies are divided."""
    factors = []
    for i in range(0, width, 2):
        length = 2 * math.pi * theta ** (i / width)
        if length < 8192 / 4:
            factors.append(1.0)
        elif length > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / length - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def write_family(path: Path, name: str, factors: npt.NDArray[np.float32] | None = None) -> Path:
    model = make_family(name, **CHANGES[name])
    return write_dense(path, make_config(name, **CHANGES[name]), model, factors)


@pytest.mark.parametrize("name", CHANGES)
def test_weights_and_configuration(name: str, tmp_path: Path) -> None:
    c = make_config(name, **CHANGES[name])
    factors = llama3_factors(c["rope_theta"], c["head_dim"], 8.0) if name == "llama" else None
    folder = find_model(str(write_family(tmp_path / "a.gguf", name, factors))).folder
    checkpoint, wanted = open_checkpoint(folder), make_family(name, **CHANGES[name])
    assert load_config(folder) == find_family(c).config.parse(c)
    states = wanted.state_dict()
    assert {*states} - {*checkpoint.tensors} <= {"lm_head.weight"}
    for tensor in checkpoint.tensors:
        assert torch.equal(checkpoint.tensor(tensor), states[tensor]), tensor


def test_factors_of_another_scaling_are_refused(tmp_path: Path) -> None:
    c = make_config("llama", **CHANGES["llama"])
    factors = llama3_factors(c["rope_theta"], c["head_dim"], 8.0)
    factors[-2] *= 1.5
    path = write_family(tmp_path / "a.gguf", "llama", factors)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight are not Llama 3's factors"):
        find_model(str(path))


GPT4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ODD = [
    "", " ", "  a", "a  b", "\n\n\nx", "it's It'S 12345 ١٢٣ ½ Ⅷ", "\t\tif x:\r\n  y", "naïve Å Å",
    "👩‍👩‍👧 ok", "don't'll", "a\u00a0b", "...!!!???", "日本語 テスト", "x" * 40, "\u200bzero",
]  # fmt: skip


@pytest.mark.parametrize(
    ("pre", "whole_words", "split"),
    [
        # as the published tokenizer.json of SmolLM2: digits, then GPT-2's own pattern
        ("smollm", False, [pre_tokenizers.Digits(individual_digits=True)]),
        # as that of Llama 3, which looks a word up before it merges
        (
            "llama-bpe",
            True,
            [pre_tokenizers.Split(tokenizers.Regex(GPT4_SPLIT), "isolated", invert=False)],
        ),
    ],
)
def test_tokenizers(
    pre: str, whole_words: bool, split: list[pre_tokenizers.PreTokenizer], tmp_path: Path
) -> None:
    theirs = model_tokenizers.train([pre_tokenizers.ByteLevel(add_prefix_space=False)], [])
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not whole_words)]
    )
    theirs.model.ignore_merges = whole_words
    vocabulary = theirs.get_vocab()
    merges = [" ".join(pair) for pair in json.loads(theirs.to_str())["model"]["merges"]]
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [1] * len(tokens),
    }  # fmt: skip
    ours = make_tokenizer(GgufFile(Path("a.gguf"), keys, {}), list_splits())
    assert ours is not None
    for text in (*model_tokenizers.TEXTS, *ODD):
        ids = theirs.encode(text).ids
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids) == text
