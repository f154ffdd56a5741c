"""GGUF files of Llama, Mistral, Qwen2 and Qwen3.

Converters put the values of Llama's queries and keys in neighbouring pairs, and store Llama 3's
scaling of positions as one factor per pair. Here that is undone.
"""

import re
from dataclasses import replace

import numpy as np

from mtpbuild.builder.checkpoint.config import Reader, RopeConfig, parse_rope
from mtpbuild.builder.gguf.configs import Config, read_rope, read_sizes
from mtpbuild.builder.gguf.container import GgufFile
from mtpbuild.builder.gguf.mapped import GgufWeight, Order
from mtpbuild.builder.gguf.tensors import LAYER, Architecture
from mtpbuild.builder.gguf.tokenizer import WordSplit, split_words
from mtpbuild.runtime.errors import CheckpointError

FACTORS = "rope_freqs.weight"
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN = {"qwen2": WordSplit((split_words(r"\p{L}"),), normalised=True)}
LLAMA = {
    "smollm": WordSplit((r"\p{N}", GPT2_WORDS)),
    "llama-bpe": WordSplit(
        (split_words(r"\p{L}", r"\p{N}{1,3}"),), whole_words=True, adds_bos=True
    ),
}
PERMUTED = re.compile(r"attn_(q|k)\.weight")


def list_llama() -> tuple[Architecture, ...]:
    return (Architecture("llama", read_llama_config, LAYER, splits=LLAMA, restore=restore_pairs),)


def list_qwen2() -> tuple[Architecture, ...]:
    return (Architecture("qwen2", read_dense_config, LAYER, splits=QWEN),)


def list_qwen3() -> tuple[Architecture, ...]:
    return (Architecture("qwen3", read_dense_config, LAYER, splits=QWEN),)


def read_dense_config(file: GgufFile, tokens: int | None = None) -> Config:
    heads = file.key("attention.head_count")
    width = file.key("attention.key_length", file.key("embedding_length") // heads)
    if (rotated := file.key("rope.dimension_count", width)) != width:
        raise CheckpointError(
            f"{file.path}: rope.dimension_count {rotated} of {width} is not supported"
        )
    return {
        **read_sizes(file, tokens),
        "intermediate_size": file.key("feed_forward_length"),
        "num_key_value_heads": file.key("attention.head_count_kv", heads),
        "head_dim": width,
        "rope_parameters": read_rope(file),
    }


def read_llama_config(file: GgufFile, tokens: int | None = None) -> Config:
    if experts := file.key("expert_count", 0):
        raise CheckpointError(f"{file.path}: expert_count {experts} is not supported; supported: 0")
    config = read_dense_config(file, tokens)
    if FACTORS in file.tensors:
        config["rope_parameters"] = read_llama3(file, config)
    return config


def read_llama3(file: GgufFile, config: Config) -> Config:
    """Return the scaling that the factors of a file were made by.

    All published files have Llama 3's bounds and original context; factors that these don't give
    are refused.
    """
    from mtpbuild.builder.models.common.rope import compute_inverse_frequencies

    tensor = file.tensor(FACTORS)
    stored = tensor.decode(tensor.read(None)).reshape(-1)
    rope = config["rope_parameters"]
    scaled = {
        **rope,
        "rope_type": "llama3",
        "factor": round(float(stored.max()), 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    read = Reader({"rope_parameters": scaled, "max_position_embeddings": 8192})
    width = config["head_dim"]
    factors = compute_inverse_frequencies(
        RopeConfig(theta=rope["rope_theta"]), width
    ) / compute_inverse_frequencies(parse_rope(read), width)
    fits = rope["rope_type"] == "default" and stored.shape == (width // 2,)
    if not fits or not np.allclose(stored, factors.numpy(), rtol=1e-3):
        raise CheckpointError(f"{file.path}: {FACTORS} are not Llama 3's factors")
    return scaled


def restore_pairs(file: GgufFile, tensor: str, weight: GgufWeight) -> GgufWeight:
    """Return queries and keys with the first values of all pairs before the second ones."""
    if not (match := PERMUTED.fullmatch(tensor)):
        return weight
    heads = file.key("attention.head_count")
    heads = heads if match[1] == "q" else file.key("attention.head_count_kv", heads)

    def order() -> Order:
        rows = np.arange(weight.shape[0]).reshape(heads, -1, 2)
        return rows.swapaxes(1, 2).ravel()

    return replace(weight, rows=order)
