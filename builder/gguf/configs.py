"""config.json of a GGUF file, from its keys."""

import logging
from collections.abc import Callable
from typing import Any

from mtpbuild.builder.gguf.container import GgufFile
from mtpbuild.runtime.errors import CheckpointError

Config = dict[str, Any]
SIGMOID = 2  # of `expert_gating_func`
# Groups of experts, and how many a token chooses, by the number of experts: those of Moonlight and
# GigaChat3, DeepSeek-V3 and R1, Kimi-K2. Converters left the numbers out until October 2025.
UNSAID_GROUPS = {64: (1, 1), 256: (8, 4), 384: (1, 1)}
logger = logging.getLogger(__name__)


def read_sizes(file: GgufFile) -> Config:
    """Return what all architectures have in config.json."""
    embedding = file.tensor("token_embd.weight")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": file.key("embedding_length"),
        "num_hidden_layers": file.layers,
        "num_attention_heads": file.key("attention.head_count"),
        "max_position_embeddings": file.key("context_length"),
        "rms_norm_eps": file.key("attention.layer_norm_rms_epsilon", kind=float),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
    }


def read_experts(file: GgufFile) -> Config:
    """Return the numbers of experts, as DeepSeek and GLM have them."""
    softmax = file.key("expert_gating_func", SIGMOID) != SIGMOID
    groups, chosen = read_groups(file)
    return {
        "intermediate_size": file.key("feed_forward_length"),
        "moe_intermediate_size": file.key("expert_feed_forward_length"),
        "n_routed_experts": file.key("expert_count"),
        "n_shared_experts": file.key("expert_shared_count", 0),
        "num_experts_per_tok": file.key("expert_used_count"),
        "n_group": groups,
        "topk_group": chosen,
        "routed_scaling_factor": file.key("expert_weights_scale", 1.0),
        "norm_topk_prob": file.key("expert_weights_norm", False),
        "scoring_func": "softmax" if softmax else "sigmoid",
        "first_k_dense_replace": file.key("leading_dense_block_count", 0),
        "num_nextn_predict_layers": file.modules,
    }


def read_groups(file: GgufFile) -> tuple[int, int]:
    """Return the number of groups of experts, and how many of them a token chooses."""
    groups, experts = file.key("expert_group_count", 0), file.key("expert_count")
    if groups or file.architecture not in ("deepseek2", "deepseek32"):
        return max(groups, 1), file.key("expert_group_used_count", None if groups > 1 else 1)
    if experts not in UNSAID_GROUPS:
        raise CheckpointError(f"{file.path}: no expert_group_count; convert the model anew")
    groups, chosen = UNSAID_GROUPS[experts]
    note = "note: %s: no expert_group_count: a token chooses %d of %d groups of its %d experts"
    logger.warning(note, file.path.name, chosen, groups, experts)
    return groups, chosen


def make_latent_reader(kind: str) -> Callable[[GgufFile], Config]:
    """Return the reader of models with latent attention."""

    def config(file: GgufFile) -> Config:
        rope = file.key("rope.dimension_count")
        width = file.key("attention.key_length_mla", file.key("attention.key_length"))
        values = file.key("attention.value_length_mla", file.key("attention.value_length"))
        return {
            "model_type": choose_latent_type(kind, file),
            **read_sizes(file),
            **read_experts(file),
            "q_lora_rank": file.key("attention.q_lora_rank", 0) or None,
            "kv_lora_rank": file.key("attention.kv_lora_rank"),
            "qk_nope_head_dim": width - rope,
            "qk_rope_head_dim": rope,
            "v_head_dim": values,
            "rope_parameters": read_rope(file),
            **(read_indexer(file) if kind != "deepseek_v3" else {}),
        }

    return config


def choose_latent_type(kind: str, file: GgufFile) -> str:
    """Return the model_type; `deepseek2` is GLM-4.7-Flash's architecture, too."""
    flash = str(file.keys.get("tokenizer.ggml.pre", "")).startswith("glm")
    return "glm4_moe_lite" if flash and kind == "deepseek_v3" else kind


def read_indexer(file: GgufFile) -> Config:
    """Return the values of sparse attention; a layer without the indexer's tensors shares one."""
    types = file.key("attention.indexer.types", [])
    if not types:
        own = (f"blk.{i}.indexer.attn_k.weight" in file.tensors for i in range(file.layers))
        types = ["full" if has else "shared" for has in own]
    named = {True: "full", False: "shared"}
    return {
        "index_n_heads": file.key("attention.indexer.head_count"),
        "index_head_dim": file.key("attention.indexer.key_length"),
        "index_topk": file.key("attention.indexer.top_k"),
        "indexer_types": [named.get(each, each) for each in types[: file.layers]],
    }


def read_rope(file: GgufFile) -> Config:
    """Return theta and the scaling of positions; converters store mscale_all_dim times 0.1.

    As in llama.cpp a factor without a type is linear, and the context is YaRN's original one if
    the file names no other.
    """

    def find(name: str, kind: type = float) -> Any:
        full = f"rope.scaling.{name}"
        present = f"{file.architecture}.{full}" in file.keys
        return file.key(full, kind=kind) if present else None

    theta = {"rope_theta": file.key("rope.freq_base", 10000.0)}
    factor = find("factor") or file.key("rope.scale_linear", 1.0) or 1.0
    kind = file.key("rope.scaling.type", "linear")
    if kind in ("none", "") or (factor == 1 and kind in ("linear", "yarn")):
        return {**theta, "rope_type": "default"}
    if kind != "yarn":
        return {**theta, "rope_type": kind, "factor": factor}
    for name in ("attn_factor", "yarn_ext_factor"):
        if find(name) not in (None, 1):
            found = f"rope.scaling.{name} {find(name)}"
            raise CheckpointError(f"{file.path}: {found} is not read; supported: 1")
    scale = round(10 * (find("yarn_log_multiplier") or 0.0), 6)
    return {
        **theta,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": find("original_context_length", int),
        "attention_factor": find("yarn_attn_factor"),
        "beta_fast": find("yarn_beta_fast"),
        "beta_slow": find("yarn_beta_slow"),
        **({"mscale": scale, "mscale_all_dim": scale} if scale else {}),
    }


def read_grouped(file: GgufFile) -> Config:
    """Return GLM-4.5's config.json."""
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **read_sizes(file),
        **read_experts(file),
        **read_heads(file),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "rope_parameters": read_partial_rope(file),
    }


def read_partial_rope(file: GgufFile) -> Config:
    """Return the rotary embedding of heads that rotate in part."""
    share = file.key("rope.dimension_count") / file.key("attention.key_length")
    return {**read_rope(file), "partial_rotary_factor": share}


def read_heads(file: GgufFile) -> Config:
    return {
        "num_key_value_heads": file.key("attention.head_count_kv"),
        "head_dim": file.key("attention.key_length"),
    }


def read_hybrid(file: GgufFile) -> Config:
    """Return the config.json of Qwen3.5 and Qwen3-Next."""
    values = file.key("ssm.time_step_rank")
    next_, moe = file.architecture == "qwen3next", file.architecture != "qwen35"
    kind = "qwen3_next" if next_ else "qwen3_5_moe_text" if moe else "qwen3_5_text"
    name = "Qwen3Next" if next_ else "Qwen3_5Moe" if moe else "Qwen3_5"
    routed: Config = {} if not moe else {
        "num_experts": file.key("expert_count"),
        "num_experts_per_tok": file.key("expert_used_count"),
        "moe_intermediate_size": file.key("expert_feed_forward_length"),
        "shared_expert_intermediate_size": file.key("expert_shared_feed_forward_length", 0),
        "norm_topk_prob": file.key("expert_weights_norm", True),
    }  # fmt: skip
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": kind,
        **read_sizes(file),
        **read_heads(file),
        "intermediate_size": file.key("feed_forward_length", 0) or 1,
        "full_attention_interval": file.key("full_attention_interval", 4),
        "linear_conv_kernel_dim": file.key("ssm.conv_kernel"),
        "linear_key_head_dim": file.key("ssm.state_size"),
        "linear_num_key_heads": file.key("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": file.key("ssm.inner_size") // values,
        **routed,
        "mtp_num_hidden_layers": file.modules,
        "rope_parameters": read_partial_rope(file),
    }
