"""Parts of a config.json that several families make from the keys of a GGUF file."""

from typing import Any

from mtpbuild.builder.gguf.container import GgufFile
from mtpbuild.runtime.errors import CheckpointError

Config = dict[str, Any]
SIGMOID = 2  # of `expert_gating_func`


def read_sizes(file: GgufFile, tokens: int | None = None) -> Config:
    """Return what all architectures have in config.json.

    tokens: the size of the vocabulary, if the file may have no embedding.
    """
    return {
        "vocab_size": tokens or file.tensor("token_embd.weight").shape[0],
        "hidden_size": file.key("embedding_length"),
        "num_hidden_layers": file.layers,
        "num_attention_heads": file.key("attention.head_count"),
        "max_position_embeddings": file.key("context_length"),
        "rms_norm_eps": file.key("attention.layer_norm_rms_epsilon", kind=float),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
    }


def read_experts(file: GgufFile) -> Config:
    """Return the numbers of experts, in groups of which a token chooses some."""
    softmax = file.key("expert_gating_func", SIGMOID) != SIGMOID
    groups = max(file.key("expert_group_count", 0), 1)
    return {
        "intermediate_size": file.key("feed_forward_length"),
        "moe_intermediate_size": file.key("expert_feed_forward_length"),
        "n_routed_experts": file.key("expert_count"),
        "n_shared_experts": file.key("expert_shared_count", 0),
        "num_experts_per_tok": file.key("expert_used_count"),
        "n_group": groups,
        "topk_group": file.key("expert_group_used_count", None if groups > 1 else 1),
        "routed_scaling_factor": file.key("expert_weights_scale", 1.0),
        "norm_topk_prob": file.key("expert_weights_norm", False),
        "scoring_func": "softmax" if softmax else "sigmoid",
        "first_k_dense_replace": file.key("leading_dense_block_count", 0),
        "num_nextn_predict_layers": file.modules,
    }


def read_heads(file: GgufFile) -> Config:
    """Return the sizes of heads that rotate in part."""
    share = file.key("rope.dimension_count") / file.key("attention.key_length")
    return {
        "num_key_value_heads": file.key("attention.head_count_kv"),
        "head_dim": file.key("attention.key_length"),
        "rope_parameters": {**read_rope(file), "partial_rotary_factor": share},
    }


def read_rope(file: GgufFile) -> Config:
    """Return theta and the scaling of positions; converters store mscale_all_dim times 0.1.

    As in llama.cpp a factor without a type is linear, and the context is YaRN's original one if
    the file names no other.
    """

    def scaling(name: str, kind: type = float) -> Any:
        full = f"rope.scaling.{name}"
        present = f"{file.architecture}.{full}" in file.keys
        return file.key(full, kind=kind) if present else None

    theta = {"rope_theta": file.key("rope.freq_base", 10000.0)}
    factor = scaling("factor") or file.key("rope.scale_linear", 1.0) or 1.0
    kind = file.key("rope.scaling.type", "linear")
    if kind in ("none", "") or (factor == 1 and kind in ("linear", "yarn")):
        return {**theta, "rope_type": "default"}
    if kind != "yarn":
        return {**theta, "rope_type": kind, "factor": factor}
    for name in ("attn_factor", "yarn_ext_factor"):
        if (value := scaling(name)) not in (None, 1):
            raise CheckpointError(
                f"{file.path}: rope.scaling.{name} {value} is not read; supported: 1"
            )
    scale = round(10 * (scaling("yarn_log_multiplier") or 0.0), 6)
    return {
        **theta,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": scaling("original_context_length", int),
        "attention_factor": scaling("yarn_attn_factor"),
        "beta_fast": scaling("yarn_beta_fast"),
        "beta_slow": scaling("yarn_beta_slow"),
        **({"mscale": scale, "mscale_all_dim": scale} if scale else {}),
    }
