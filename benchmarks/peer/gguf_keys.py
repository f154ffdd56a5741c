"""The architecture, keys, tensors and shapes that llama.cpp requires of a model's GGUF file.

`deepseek2` is DeepSeek-V3's class, `qwen2` the trunk of MiMo, `qwen35` the text model of Qwen3.5.
Only llama.cpp's server runs MTP modules; of these architectures it supports the module of `qwen35`,
which is one more layer (`module`). Shapes are NumPy's, the reverse of ggml's. Nothing here needs
`gguf`.
"""

from typing import Any

Config = dict[str, Any]  # config.json of the checkpoint
Shapes = dict[str, tuple[int, ...]]
SIGMOID = 2  # gguf.ExpertGatingFuncType
# For Qwen3.5 llama.cpp requires sections, although text has one position per token.
SECTIONS = (11, 11, 10)
# By model_type.
ARCHITECTURES = {"deepseek_v3": "deepseek2", "mimo": "qwen2", "qwen3_5_text": "qwen35"}
# Matrices that llama.cpp requires in fp32, whatever the others' type.
PLAIN = ("ffn_gate_inp", "ssm_conv1d")
DECAY = "ssm_a"  # the rate at which the state's logarithm falls, negative


def architecture(c: Config) -> str:
    kind = c["model_type"]
    if kind not in ARCHITECTURES:
        raise SystemExit(f"model_type {kind}: expected {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[kind]


def write_keys(writer: Any, c: Config, *, module: bool = False) -> None:
    """Write the configuration's keys to `writer`, a gguf.GGUFWriter."""
    writer.add_vocab_size(c["vocab_size"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(c["num_hidden_layers"] + module)
    if module:
        writer.add_nextn_predict_layers(1)
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_head_count(c["num_attention_heads"])
    if architecture(c) == "deepseek2":
        writer.add_rope_freq_base(c["rope_theta"])
        write_latent_keys(writer, c)
        write_expert_keys(writer, c)
        return
    writer.add_head_count_kv(c["num_key_value_heads"])
    if architecture(c) == "qwen35":
        write_hybrid_keys(writer, c)
    else:
        writer.add_rope_freq_base(c["rope_theta"])


def write_hybrid_keys(writer: Any, c: Config) -> None:
    """Write keys of layers that are attention or a gated delta rule."""
    rope, width = c["rope_parameters"], c["head_dim"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(width * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope.get("mrope_section", SECTIONS), 0])
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_full_attention_interval(c["full_attention_interval"])
    writer.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
    writer.add_ssm_inner_size(c["linear_num_value_heads"] * c["linear_value_head_dim"])
    writer.add_ssm_state_size(c["linear_key_head_dim"])
    writer.add_ssm_time_step_rank(c["linear_num_value_heads"])
    writer.add_ssm_group_count(c["linear_num_key_heads"])


def write_latent_keys(writer: Any, c: Config) -> None:
    """Write keys of latent attention in the absorbed form: one head of the latent's width."""
    rank, rope = c["kv_lora_rank"], c["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(c["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(c["v_head_dim"])
    # Without this key llama.cpp assumes that only models of 26, 27 or 48 layers lack q_lora.
    writer.add_q_lora_rank(c["q_lora_rank"] or 0)
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rope)
    if scaling := c.get("rope_scaling"):
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        # llama.cpp's own converter stores it with this factor, and its loader takes it out.
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def write_expert_keys(writer: Any, c: Config) -> None:
    import gguf

    writer.add_leading_dense_block_count(c["first_k_dense_replace"])
    writer.add_expert_count(c["n_routed_experts"])
    writer.add_expert_used_count(c["num_experts_per_tok"])
    writer.add_expert_shared_count(c["n_shared_experts"])
    writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
    writer.add_expert_weights_scale(c["routed_scaling_factor"])
    writer.add_expert_weights_norm(c["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType(SIGMOID))
    writer.add_expert_group_count(c["n_group"])
    writer.add_expert_group_used_count(c["topk_group"])


def shapes(c: Config, *, module: bool = False) -> Shapes:
    """Return every tensor of the file with its shape."""
    E, V = c["hidden_size"], c["vocab_size"]
    found: Shapes = {
        "token_embd.weight": (V, E),
        "output_norm.weight": (E,),
    }
    if not c.get("tie_word_embeddings"):
        found["output.weight"] = (V, E)
    layers = {"qwen2": grouped_layer, "qwen35": hybrid_layer, "deepseek2": latent_layer}
    layer = layers[architecture(c)]
    count = c["num_hidden_layers"]
    parts = [layer(c, i) for i in range(count)] + ([hybrid_module(c)] if module else [])
    for i, part in enumerate(parts):
        found |= {f"blk.{i}.{name}": shape for name, shape in part.items()}
    return found


def grouped_layer(c: Config, layer: int) -> Shapes:
    E, heads, own = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    width = c.get("head_dim") or E // heads
    sizes = {"q": heads * width, "k": own * width, "v": own * width}
    return {
        "attn_norm.weight": (E,),
        **{f"attn_{name}.weight": (size, E) for name, size in sizes.items()},
        **{f"attn_{name}.bias": (size,) for name, size in sizes.items()},
        "attn_output.weight": (E, heads * width),
        "ffn_norm.weight": (E,),
        **mlp("", E, c["intermediate_size"]),
    }


def hybrid_layer(c: Config, layer: int) -> Shapes:
    E = c["hidden_size"]
    delta = (layer + 1) % c["full_attention_interval"]
    first = delta_rule(c) if delta else gated_attention(c)
    norms: Shapes = {"attn_norm.weight": (E,), "post_attention_norm.weight": (E,)}
    return norms | first | mlp("", E, c["intermediate_size"])


def hybrid_module(c: Config) -> Shapes:
    E = c["hidden_size"]
    norms = {f"nextn.{name}.weight": (E,) for name in ("enorm", "hnorm", "shared_head_norm")}
    attention = hybrid_layer(c, c["full_attention_interval"] - 1)
    return attention | {"nextn.eh_proj.weight": (E, 2 * E)} | norms


def gated_attention(c: Config) -> Shapes:
    E, width = c["hidden_size"], c["head_dim"]
    queries, own = c["num_attention_heads"] * width, c["num_key_value_heads"] * width
    return {
        "attn_q.weight": (2 * queries, E),  # each with its gate
        "attn_k.weight": (own, E),
        "attn_v.weight": (own, E),
        "attn_q_norm.weight": (width,),
        "attn_k_norm.weight": (width,),
        "attn_output.weight": (E, queries),
    }


def delta_rule(c: Config) -> Shapes:
    E, heads = c["hidden_size"], c["linear_num_value_heads"]
    keys, value = c["linear_num_key_heads"] * c["linear_key_head_dim"], c["linear_value_head_dim"]
    channels = 2 * keys + heads * value
    return {
        "attn_qkv.weight": (channels, E),
        "attn_gate.weight": (heads * value, E),
        "ssm_conv1d.weight": (channels, c["linear_conv_kernel_dim"]),
        "ssm_dt.bias": (heads,),
        DECAY: (heads,),
        "ssm_beta.weight": (heads, E),
        "ssm_alpha.weight": (heads, E),
        "ssm_norm.weight": (value,),
        "ssm_out.weight": (E, heads * value),
    }


def latent_layer(c: Config, layer: int) -> Shapes:
    E, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    queries, q_rank = heads * (nope + rope), c["q_lora_rank"]
    q: Shapes = {"attn_q.weight": (queries, E)}
    if q_rank:
        q = {
            "attn_q_a.weight": (q_rank, E),
            "attn_q_a_norm.weight": (q_rank,),
            "attn_q_b.weight": (queries, q_rank),
        }
    moe = layer >= c["first_k_dense_replace"]
    return {
        "attn_norm.weight": (E,),
        **q,
        "attn_kv_a_mqa.weight": (rank + rope, E),
        "attn_kv_a_norm.weight": (rank,),
        "attn_output.weight": (E, heads * value),
        "ffn_norm.weight": (E,),
        "attn_k_b.weight": (heads, rank, nope),
        "attn_v_b.weight": (heads, value, rank),
        **(experts(c) if moe else mlp("", E, c["intermediate_size"])),
    }


def experts(c: Config) -> Shapes:
    E, inner, count = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
    routed = {name: (count, *shape) for name, shape in mlp("_exps", E, inner).items()}
    router = {"ffn_gate_inp.weight": (count, E), "exp_probs_b.bias": (count,)}
    return router | routed | mlp("_shexp", E, inner * c["n_shared_experts"])


def mlp(kind: str, hidden: int, inner: int) -> Shapes:
    return {
        f"ffn_gate{kind}.weight": (inner, hidden),
        f"ffn_up{kind}.weight": (inner, hidden),
        f"ffn_down{kind}.weight": (hidden, inner),
    }
