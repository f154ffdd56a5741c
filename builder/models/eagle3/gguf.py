"""GGUF files of EAGLE-3 heads, as llama.cpp's converter writes them.

Beside Llama's layer they have the layers to tap, and the target's ids of the drafted tokens.
"""

from dataclasses import replace
from typing import Any

from mtpbuild.builder.gguf.container import DRAFT_IDS, GgufFile
from mtpbuild.builder.gguf.mapped import GgufWeight
from mtpbuild.builder.gguf.tensors import LAYER, Architecture
from mtpbuild.builder.models.dense.gguf import read_llama_config, restore_pairs
from mtpbuild.builder.models.eagle3.config import CLASSES, TAPS

ARCHITECTURE = "eagle3"
TAP_KEYS = ("target_layers", "extract_layers")  # the key's name now, and before llama.cpp had it


def read_head_values(file: GgufFile) -> dict[str, Any]:
    """Return what the head's config.json says."""
    embedding = file.tensors.get("token_embd.weight")
    tokens = file.key("vocab_size") if embedding is None else embedding.shape[0]
    named = next((key for key in TAP_KEYS if f"{ARCHITECTURE}.{key}" in file.keys), TAP_KEYS[0])
    ids = file.tensors.get(DRAFT_IDS)
    return {
        "architectures": [CLASSES[0]],
        **read_llama_config(file, tokens),
        "tie_word_embeddings": False,  # without an lm_head it uses the trunk's
        TAPS: file.key(named, kind=list),
        "target_hidden_size": file.key("target_hidden_size", 0),
        "norm_before_residual": file.key("norm_before_residual", False),
        "norm_before_fc": file.key("norm_before_fc", False),
        **({} if ids is None else {"draft_vocab_size": ids.shape[-1]}),
    }


def list_heads() -> tuple[Architecture, ...]:
    names = LAYER | {"attn_norm_2": "hidden_norm"}
    return (Architecture(ARCHITECTURE, read_head_values, names, restore=restore_weight),)


def restore_weight(file: GgufFile, tensor: str, weight: GgufWeight) -> GgufWeight:
    if tensor == "enc.output_norm.weight":
        return replace(weight, name="input_norm.weight")
    return restore_pairs(file, tensor, weight)
