"""GGUF files of DeepSeek-V3 and R1, and of models with their architecture."""

import logging
from collections.abc import Iterator

import numpy as np

from mtpbuild.builder.gguf.configs import Config, read_experts, read_rope, read_sizes
from mtpbuild.builder.gguf.container import Floats, GgufFile
from mtpbuild.builder.gguf.mapped import GgufWeight
from mtpbuild.builder.gguf.tensors import (
    LAYER,
    MODULE_LAYER,
    SHARED_EXPERTS,
    Architecture,
    LayerTensors,
    check_shape,
)
from mtpbuild.builder.gguf.tokenizer import WHITE_SPACE, PreTokenizer
from mtpbuild.runtime.errors import CheckpointError

TENSORS = LAYER | SHARED_EXPERTS | MODULE_LAYER | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}  # fmt: skip
WORDS = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{WHITE_SPACE}",
)
# Groups of experts, and how many a token chooses, by the number of experts: those of Moonlight and
# GigaChat3, DeepSeek-V3 and R1, Kimi-K2. Converters left the numbers out until October 2025.
UNSAID_GROUPS = {64: (1, 1), 256: (8, 4), 384: (1, 1)}
logger = logging.getLogger(__name__)


def list_architectures() -> tuple[Architecture, ...]:
    return (
        Architecture(
            "deepseek2",
            lambda file: read_latent(file) | read_unsaid_groups(file),
            TENSORS,
            splits={"deepseek-v3": PreTokenizer(WORDS)},
            merge=merge_kv_heads,
        ),
    )


def read_latent(file: GgufFile) -> Config:
    """Return the config.json of models with latent attention."""
    rope = file.key("rope.dimension_count")
    width = file.key("attention.key_length_mla", file.key("attention.key_length"))
    return {
        **read_sizes(file),
        **read_experts(file),
        "q_lora_rank": file.key("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": file.key("attention.kv_lora_rank"),
        "qk_nope_head_dim": width - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": file.key("attention.value_length_mla", file.key("attention.value_length")),
        "rope_parameters": read_rope(file),
    }


def read_unsaid_groups(file: GgufFile) -> Config:
    """Return the groups of experts, if a file does not say them."""
    experts = file.key("expert_count")
    if file.key("expert_group_count", 0):
        return {}
    if experts not in UNSAID_GROUPS:
        raise CheckpointError(f"{file.path}: no expert_group_count; convert the model anew")
    groups, chosen = UNSAID_GROUPS[experts]
    note = "note: %s: no expert_group_count: a token chooses %d of %d groups of its %d experts"
    logger.warning(note, file.path.name, chosen, groups, experts)
    return {"n_group": groups, "topk_group": chosen}


def merge_kv_heads(file: GgufFile, layer: str, tensors: LayerTensors) -> Iterator[GgufWeight]:
    """Yield kv_b_proj [heads * (nope + v), latent]; the file has keys transposed in each head."""
    if not {"attn_k_b.weight", "attn_v_b.weight"} <= tensors.keys():
        return
    keys, values = tensors.pop("attn_k_b.weight"), tensors.pop("attn_v_b.weight")
    check_shape(keys, len(keys.shape) == 3)
    heads, rank, nope = keys.shape
    check_shape(values, len(values.shape) == 3 and values.shape[::2] == (heads, rank))
    shape = (heads * (nope + values.shape[1]), rank)
    name = f"{layer}.self_attn.kv_b_proj.weight"
    yield GgufWeight(name, shape, (keys, values), change=join_keys_and_values)


def join_keys_and_values(keys: Floats, values: Floats) -> Floats:
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1)
