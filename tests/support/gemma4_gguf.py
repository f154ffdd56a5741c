"""Writes GGUF files of Gemma-4 and its assistant with the names that two converters give."""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from tests.support.gguf_files import Array, usual, write_tensors

TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "pre_projection": "nextn.pre_projection",
    "post_projection": "nextn.post_projection",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    "router.proj": "ffn_gate_inp",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
WHOLE = {  # names without an ending
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}


def rename(name: str) -> str:
    """Return a tensor's name in llama.cpp's files."""
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
        stem = match[2].removesuffix(".weight")
        return f"blk.{match[1]}.{WHOLE.get(stem) or LAYER[stem] + '.weight'}"
    return TOP[name.removesuffix(".weight")] + ".weight"


def convert(model: Any) -> dict[str, Array]:
    """Return a model's tensors under llama.cpp's names."""
    return {
        rename(name): value.float().numpy()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }


def list_keys(text: Any) -> dict[str, Any]:
    """Return the keys that trunk and head have, without the architecture's name."""
    near, full = (text.per_layer_config[f"{kind}_attention"] for kind in ("sliding", "full"))
    slides = [kind == "sliding_attention" for kind in text.layer_types]
    heads = [(near if slide else full).num_key_value_heads for slide in slides]
    layers, shared = text.num_hidden_layers, text.num_kv_shared_layers
    inner: Any = text.intermediate_size
    if text.use_double_wide_mlp:
        inner = [inner * (1 + (i >= layers - shared)) for i in range(layers)]
    return {
        "block_count": layers,
        "context_length": text.max_position_embeddings,
        "embedding_length": text.hidden_size,
        "feed_forward_length": inner,
        "attention.head_count": text.num_attention_heads,
        "attention.head_count_kv": heads if len({*heads}) > 1 else heads[0],
        "attention.key_length": full.head_dim,
        "attention.key_length_swa": near.head_dim,
        "attention.layer_norm_rms_epsilon": text.rms_norm_eps,
        "attention.sliding_window": text.sliding_window,
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": text.hidden_size_per_layer_input,
        "final_logit_softcapping": text.final_logit_softcapping,
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": near.head_dim,
        "rope.freq_base": text.rope_parameters["full_attention"]["rope_theta"],
        "rope.freq_base_swa": text.rope_parameters["sliding_attention"]["rope_theta"],
    }


def make_factors(text: Any) -> Array:
    """Return one factor per pair, of which a part turns."""
    width = list_keys(text)["attention.key_length"]
    turning = int(width * text.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    return np.where(np.arange(width // 2) < turning, 1, 1e30).astype(np.float32)


def write(
    path: Path, name: str, keys: dict[str, Any], tensors: dict[str, Array], kind: Type
) -> Path:
    """Write a file of architecture `name`."""
    path.parent.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(path, name)
    for key, value in keys.items():
        add = {
            bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
            list: writer.add_array, str: writer.add_string,
        }[type(value)]  # fmt: skip
        add(key if key.startswith("tokenizer.") else f"{name}.{key}", value)
    write_tensors(writer, tensors, usual(kind))
    return path


def write_trunk(
    path: Path,
    model: Any,
    kind: Type = Type.F32,
    keys: dict[str, Any] | None = None,
    tensors: dict[str, Array] | None = None,
) -> Path:
    """Write a trunk; keys and tensors: what is added, or put in the place of others."""
    text = model.config
    written = list_keys(text)
    if text.enable_moe_block:
        written |= {
            "expert_count": text.num_experts,
            "expert_used_count": text.top_k_experts,
            "expert_feed_forward_length": text.moe_intermediate_size,
        }
    values = convert(model) | {"rope_freqs.weight": make_factors(text)} | (tensors or {})
    return write(path, "gemma4", written | (keys or {}), values, kind)


def write_head(
    path: Path,
    model: Any,
    kind: Type = Type.F32,
    *,
    others: bool = False,
    tensors: dict[str, Array] | None = None,
) -> Path:
    """Write an assistant as llama.cpp does, or as ik_llama.cpp does."""
    text = model.config.text_config
    keys, values = list_keys(text), convert(model) | (tensors or {})
    width = model.config.backbone_hidden_size
    if not others:
        keys |= {"embedding_length_out": width, "nextn_predict_layers": text.num_hidden_layers}
        values["rope_freqs.weight"] = make_factors(text)
        return write(path, "gemma4-assistant", keys, values, kind)
    keys |= {"backbone_embedding_length": width}
    for dropped in ("shared_kv_layers", "embedding_length_per_layer_input"):
        keys = {key: value for key, value in keys.items() if not key.endswith(dropped)}
    renamed = (
        (re.sub(r"nextn\.(\w+)_projection", r"mtp_\1_proj", name), value)
        for name, value in values.items()
    )
    return write(path, "gemma4_mtp", keys, dict(renamed), kind)
