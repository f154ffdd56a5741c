"""Names, values and keys of a checkpoint in GGUF, as llama.cpp's converters write them.

Tensors may be on the meta device: then the result has their shapes. Norms of Qwen3.5 become factors
(a checkpoint stores the factor minus 1), the decay a rate, experts a stack, `kv_b_proj` its halves.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import gguf
import gguf_gemma4
import torch
from torch import Tensor

Config = dict[str, Any]  # config.json of the checkpoint
Read = Callable[[str], Tensor]  # a tensor of the checkpoint, by name
Named = Iterator[tuple[str, Tensor]]
ARCHITECTURES = {
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next",
    "deepseek_v3": "deepseek2", "glm4_moe_lite": "deepseek2", "deepseek_v32": "deepseek32",
    "glm_moe_dsa": "glm-dsa", "glm4_moe": "glm4moe", "mimo": "qwen2",
    "gemma4_text": "gemma4", "gemma4_unified_text": "gemma4",
    "gemma4_assistant": gguf_gemma4.HEAD, "gemma4_unified_assistant": gguf_gemma4.HEAD,
}  # fmt: skip
HYBRID = {"qwen35", "qwen35moe", "qwen3next"}
MLP = ("gate", "up", "down")
# Of a layer: the checkpoint's names and GGUF's.
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp", "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm", "shared_head.norm": "nextn.shared_head_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in MLP},
    **{f"mlp.shared_expert.{x}_proj": f"ffn_{x}_shexp" for x in MLP},
    **{f"mlp.shared_experts.{x}_proj": f"ffn_{x}_shexp" for x in MLP},
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.wq_b": "indexer.attn_q_b", "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
}  # fmt: skip
MODULE_NORMS = {
    "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head_norm": "norm",
}  # fmt: skip


def find_architecture(c: Config) -> str:
    if (kind := c["model_type"]) not in ARCHITECTURES:
        raise SystemExit(f"model_type {kind}: expected {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[kind]


def count_modules(c: Config) -> int:
    return int(c.get("mtp_num_hidden_layers") or c.get("num_nextn_predict_layers") or 0)


def convert_tensors(c: Config, names: Iterable[str], read: Read, modules: int) -> Named:
    """Yield all tensors as a converter gives them; names: of the checkpoint's tensors.

    modules: how many MTP modules the file gets, as layers after the trunk's.
    """
    arch, names = find_architecture(c), [*names]
    if arch in gguf_gemma4.NAMES:
        yield from gguf_gemma4.convert_tensors(c, names, read)
        return
    layers = c["num_hidden_layers"]
    one = int(arch in HYBRID)
    yield "token_embd.weight", read("model.embed_tokens.weight")
    yield "output_norm.weight", read("model.norm.weight") + one
    if not c.get("tie_word_embeddings"):
        yield "output.weight", read("lm_head.weight")
    for i in range(layers + modules):
        module = i >= layers and arch in HYBRID
        at = f"mtp.layers.{i - layers}." if module else f"model.layers.{i}."
        own = {name.removeprefix(at): name for name in names if name.startswith(at)}
        for name, value in convert_layer(c, arch, own, read):
            yield f"blk.{i}.{name}", value
        if module:
            yield f"blk.{i}.nextn.eh_proj.weight", read("mtp.fc.weight")
            for to, name in MODULE_NORMS.items():
                yield f"blk.{i}.nextn.{to}.weight", read(f"mtp.{name}.weight") + 1


def convert_layer(c: Config, arch: str, own: dict[str, str], read: Read) -> Named:
    """Yield a layer's tensors; own: its names in the layer -> in the checkpoint."""
    named = arch in {*HYBRID, "glm4moe"}
    simple = NAMES | {"post_attention_layernorm": "post_attention_norm" if named else "ffn_norm"}
    for name, full in own.items():
        stem, _, end = name.rpartition(".")
        if stem in simple and end in ("weight", "bias"):
            is_offset = stem.endswith("norm") and arch in HYBRID
            yield f"{simple[stem]}.{end}", read(full) + 1 if is_offset else read(full)
    if "mlp.experts.0.up_proj.weight" in own:
        count = c.get("n_routed_experts") or c["num_experts"]
        for x in MLP:
            stack = (read(own[f"mlp.experts.{e}.{x}_proj.weight"]) for e in range(count))
            yield f"ffn_{x}_exps.weight", torch.stack([*stack])
    if (bias := "mlp.gate.e_score_correction_bias") in own:
        yield "exp_probs_b.bias", read(own[bias])
    if (gate := "mlp.shared_expert_gate.weight") in own:
        yield "ffn_gate_inp_shexp.weight", read(own[gate])[0]
    if (kv := "self_attn.kv_b_proj.weight") in own:
        nope, values = c["qk_nope_head_dim"], c["v_head_dim"]
        heads = read(own[kv]).reshape(-1, nope + values, c["kv_lora_rank"])
        yield "attn_k_b.weight", heads[:, :nope].mT
        yield "attn_v_b.weight", heads[:, nope:]
    if "linear_attn.A_log" in own:
        yield from convert_delta_rule(c, arch, lambda name: read(own[f"linear_attn.{name}"]))


def convert_delta_rule(c: Config, arch: str, read: Read) -> Named:
    """Yield a delta rule's tensors; only Qwen3.5's value heads are tiled."""
    keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
    width, key_width, group = c["linear_value_head_dim"], c["linear_key_head_dim"], values // keys

    def tile(value: Tensor, size: int) -> Tensor:
        """Move head j * group + r to place r * keys + j; on the first axis."""
        if arch == "qwen3next":
            return value
        return value.reshape(keys, group, size, -1).transpose(0, 1).reshape(value.shape)

    def tile_values(value: Tensor) -> Tensor:
        """Tile the values, which follow queries and keys."""
        start = 2 * keys * key_width
        return torch.cat([value[:start], tile(value[start:], width)])

    if arch == "qwen3next":
        both = read("in_proj_qkvz.weight")
        sizes = [key_width, key_width, group * width, group * width]
        *qkv, z = (p.flatten(0, 1) for p in both.unflatten(0, (keys, -1)).split(sizes, dim=1))
        yield "attn_qkv.weight", torch.cat(qkv)
        yield "attn_gate.weight", z
        yield "ssm_ba.weight", read("in_proj_ba.weight")
    else:
        yield "attn_qkv.weight", tile_values(read("in_proj_qkv.weight"))
        yield "attn_gate.weight", tile(read("in_proj_z.weight"), width)
        yield "ssm_beta.weight", tile(read("in_proj_b.weight"), 1)
        yield "ssm_alpha.weight", tile(read("in_proj_a.weight"), 1)
    yield "ssm_conv1d.weight", tile_values(read("conv1d.weight")[:, 0])
    yield "ssm_dt.bias", tile(read("dt_bias"), 1)
    yield "ssm_a", tile(-read("A_log").exp(), 1)
    yield "ssm_norm.weight", read("norm.weight")
    yield "ssm_out.weight", tile(read("out_proj.weight").mT, width).mT


def write_keys(writer: gguf.GGUFWriter, c: Config, modules: int) -> None:
    """Write the configuration's keys."""
    arch = find_architecture(c)
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}
    if arch in gguf_gemma4.NAMES:
        gguf_gemma4.write_keys(writer, gguf_gemma4.list_keys(c))
        return
    writer.add_vocab_size(c["vocab_size"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(c["num_hidden_layers"] + modules)
    if modules:
        writer.add_nextn_predict_layers(modules)
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_rope_freq_base(float(rope.get("rope_theta") or c.get("rope_theta") or 10000))
    write_scaling(writer, arch, rope)
    if "intermediate_size" in c:
        writer.add_feed_forward_length(c["intermediate_size"])
    if experts := c.get("n_routed_experts") or c.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(c["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
    if "kv_lora_rank" not in c:
        write_grouped_keys(writer, c, arch, rope)
    if "first_k_dense_replace" in c:
        writer.add_leading_dense_block_count(c["first_k_dense_replace"])
        writer.add_expert_shared_count(c["n_shared_experts"])
        writer.add_expert_weights_scale(c["routed_scaling_factor"])
        writer.add_expert_weights_norm(c["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(c["n_group"])
        writer.add_expert_group_used_count(c["topk_group"])
    if "kv_lora_rank" in c:
        write_latent_keys(writer, c, arch)


def write_grouped_keys(writer: gguf.GGUFWriter, c: Config, arch: str, rope: Config) -> None:
    """Write the keys of grouped attention, and of Qwen3.5's other layers."""
    width = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    part = rope.get("partial_rotary_factor") or c.get("partial_rotary_factor")
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(width)
    writer.add_value_length(width)
    if part or arch in HYBRID:
        writer.add_rope_dimension_count(int(width * (part or 0.25)))
    if arch not in HYBRID:
        return
    if arch != "qwen3next":  # llama.cpp requires sections, although text has one position per token
        writer.add_rope_dimension_sections([*rope.get("mrope_section", (11, 11, 10)), 0])
    writer.add_full_attention_interval(c.get("full_attention_interval", 4))
    writer.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
    writer.add_ssm_inner_size(c["linear_num_value_heads"] * c["linear_value_head_dim"])
    writer.add_ssm_state_size(c["linear_key_head_dim"])
    writer.add_ssm_time_step_rank(c["linear_num_value_heads"])
    writer.add_ssm_group_count(c["linear_num_key_heads"])
    if inner := c.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(inner)


def write_latent_keys(writer: gguf.GGUFWriter, c: Config, arch: str) -> None:
    """Write the keys of latent attention in the absorbed form: one head of the latent's width."""
    rank, rotary = c["kv_lora_rank"], c["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rotary)
    writer.add_value_length(rank)
    writer.add_key_length_mla(c["qk_nope_head_dim"] + rotary)
    writer.add_value_length_mla(c["v_head_dim"])
    # Without this key llama.cpp assumes that only models of 26, 27 or 48 layers lack q_lora.
    writer.add_q_lora_rank(c.get("q_lora_rank") or 0)
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rotary)
    if "mscale_all_dim" in (scaling := c.get("rope_scaling") or {}):
        # llama.cpp's own converter stores it with this factor, and its loader takes it out.
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
    if "index_topk" in c:
        writer.add_uint32(f"{arch}.attention.indexer.head_count", c["index_n_heads"])
        writer.add_uint32(f"{arch}.attention.indexer.key_length", c["index_head_dim"])
        writer.add_uint32(f"{arch}.attention.indexer.top_k", c["index_topk"])


def write_scaling(writer: gguf.GGUFWriter, arch: str, rope: Config) -> None:
    """Write the keys of scaled positions, as converters do for all architectures."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for name in ("beta_fast", "beta_slow", "attention_factor"):
        if name in rope:
            key = name.replace("attention", "attn")
            writer.add_float32(f"{arch}.rope.scaling.yarn_{key}", rope[name])
