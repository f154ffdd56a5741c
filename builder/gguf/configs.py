"""config.json of a GGUF file, from its keys."""

from collections.abc import Callable
from typing import Any

from mtpbuild.builder.gguf.container import GgufFile

Config = dict[str, Any]
SIGMOID = 2  # of `expert_gating_func`


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
    dense = file.key("leading_dense_block_count", 0)
    return {
        "intermediate_size": file.key("feed_forward_length"),
        "moe_intermediate_size": file.key("expert_feed_forward_length"),
        "n_routed_experts": file.key("expert_count"),
        "n_shared_experts": file.key("expert_shared_count", 0),
        "num_experts_per_tok": file.key("expert_used_count"),
        "n_group": file.key("expert_group_count", 1),
        "topk_group": file.key("expert_group_used_count", 1),
        "routed_scaling_factor": file.key("expert_weights_scale", 1.0),
        "norm_topk_prob": file.key("expert_weights_norm", False),
        "scoring_func": "softmax" if softmax else "sigmoid",
        "first_k_dense_replace": dense,
        "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(file.layers)],
        "num_nextn_predict_layers": file.modules,
    }


def make_latent_reader(kind: str) -> Callable[[GgufFile], Config]:
    """Return the reader of models with latent attention."""

    def config(file: GgufFile) -> Config:
        rope = file.key("rope.dimension_count")
        width = file.key("attention.key_length_mla", file.key("attention.key_length"))
        values = file.key("attention.value_length_mla", file.key("attention.value_length"))
        theta = file.key("rope.freq_base", 10000.0)
        model, name = choose_latent_class(kind, file)
        return {
            "architectures": [name],
            "model_type": model,
            **read_sizes(file),
            **read_experts(file),
            "q_lora_rank": file.key("attention.q_lora_rank", 0) or None,
            "kv_lora_rank": file.key("attention.kv_lora_rank"),
            "qk_nope_head_dim": width - rope,
            "qk_rope_head_dim": rope,
            "v_head_dim": values,
            "rope_parameters": {"rope_theta": theta, **read_yarn(file)},
            **(read_indexer(file) if kind != "deepseek_v3" else {}),
        }

    return config


def choose_latent_class(kind: str, file: GgufFile) -> tuple[str, str]:
    """Return model_type and class; `deepseek2` is GLM-4.7-Flash's architecture, too."""
    if kind == "deepseek_v3" and str(file.keys.get("tokenizer.ggml.pre", "")).startswith("glm"):
        kind = "glm4_moe_lite"
    names = {
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
        "deepseek_v32": "DeepseekV32ForCausalLM",
        "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    }
    return kind, names[kind]


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


def read_yarn(file: GgufFile) -> Config:
    """Return the scaling of positions; converters store mscale_all_dim times 0.1."""
    kind = file.key("rope.scaling.type", "none")
    if kind in ("none", ""):
        return {"rope_type": "default"}
    factor = file.key("rope.scaling.factor", 1.0)
    if kind != "yarn":
        return {"rope_type": kind, "factor": factor}
    scale = round(10 * file.key("rope.scaling.yarn_log_multiplier", 0.0), 6)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": file.key("rope.scaling.original_context_length"),
        "beta_fast": file.key("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": file.key("rope.scaling.yarn_beta_slow", 1.0),
        **({"mscale": scale, "mscale_all_dim": scale} if scale else {}),
    }


def read_grouped(file: GgufFile) -> Config:
    """Return GLM-4.5's config.json."""
    width = file.key("attention.key_length")
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **read_sizes(file),
        **read_experts(file),
        **read_heads(file),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "rope_theta": file.key("rope.freq_base", 10000.0),
        "partial_rotary_factor": file.key("rope.dimension_count") / width,
    }


def read_heads(file: GgufFile) -> Config:
    return {
        "num_key_value_heads": file.key("attention.head_count_kv"),
        "head_dim": file.key("attention.key_length"),
    }


def read_hybrid(file: GgufFile) -> Config:
    """Return the config.json of Qwen3.5 and Qwen3-Next."""
    width, values = file.key("attention.key_length"), file.key("ssm.time_step_rank")
    next_, moe = file.architecture == "qwen3next", file.architecture != "qwen35"
    kind = "qwen3_next" if next_ else "qwen3_5_moe_text" if moe else "qwen3_5_text"
    name = "Qwen3Next" if next_ else "Qwen3_5Moe" if moe else "Qwen3_5"
    routed = {
        "num_experts": file.key("expert_count", 0),
        "num_experts_per_tok": file.key("expert_used_count", 1),
        "moe_intermediate_size": file.key("expert_feed_forward_length", 1),
        "shared_expert_intermediate_size": file.key("expert_shared_feed_forward_length", 0),
        "norm_topk_prob": file.key("expert_weights_norm", True),
    }
    theta, rotated = file.key("rope.freq_base", 10000.0), file.key("rope.dimension_count")
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
        **(routed if moe else {}),
        "mtp_num_hidden_layers": file.modules,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": rotated / width,
        },
    }
