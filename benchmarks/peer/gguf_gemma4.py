"""Names and keys of Gemma-4 and of its assistant in GGUF, as llama.cpp's converter writes them."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import gguf
import torch
from torch import Tensor

HEAD = "gemma4-assistant"
NAMES = ("gemma4", HEAD)  # of the architectures
TOP = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
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
    """Return the file's name of a checkpoint's tensor."""
    stem = name.removeprefix("model.").removesuffix(".weight")
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)", stem):
        return f"blk.{match[1]}.{WHOLE.get(match[2]) or LAYER[match[2]] + '.weight'}"
    return TOP[stem] + ".weight"


def convert_tensors(
    c: dict[str, Any], names: Iterable[str], read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors; names: of the checkpoint's, whose experts may be stacks."""
    for name in names:
        if name.endswith(first := ".0.gate_proj.weight"):
            yield from stack_experts(name.removesuffix(first), c["num_experts"], read)
        elif name != "lm_head.weight" and not re.search(r"experts\.\d", name):
            yield rename(name), read(name)
    yield "rope_freqs.weight", make_factors(c.get("text_config", c))


def stack_experts(
    at: str, count: int, read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a layer's experts as stacks, gates before what they gate."""

    def join(*parts: str) -> Tensor:
        rows = [torch.cat([read(f"{at}.{e}.{x}_proj.weight") for x in parts]) for e in range(count)]
        return torch.stack(rows)

    yield rename(f"{at}.gate_up_proj"), join("gate", "up")
    yield rename(f"{at}.down_proj"), join("down")


def make_factors(c: dict[str, Any]) -> Tensor:
    """Return one factor per pair of the layers without a window, of which a part turns."""
    pairs = c["global_head_dim"] // 2
    turning = int(pairs * c["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    return torch.where(torch.arange(pairs) < turning, 1.0, 1e30)


def list_keys(c: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a published configuration, without the architecture's name."""
    if "text_config" in c:  # the assistant's
        text = c["text_config"]
        return list_keys(text) | {
            "embedding_length_out": c["backbone_hidden_size"],
            "nextn_predict_layers": text["num_hidden_layers"],
        }
    rope, layers = c["rope_parameters"], c["num_hidden_layers"]
    slides = [kind == "sliding_attention" for kind in c["layer_types"]]
    near = c["num_key_value_heads"]
    full = c.get("num_global_key_value_heads") or near
    heads, shared = [near if slide else full for slide in slides], c["num_kv_shared_layers"]
    inner: Any = c["intermediate_size"]
    if c.get("use_double_wide_mlp"):
        inner = [inner * (1 + (i >= layers - shared)) for i in range(layers)]
    keys = {
        "vocab_size": c["vocab_size"],
        "block_count": layers,
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": inner,
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": heads if len({*heads}) > 1 else heads[0],
        "attention.key_length": c["global_head_dim"],
        "attention.key_length_swa": c["head_dim"],
        "attention.value_length": c["global_head_dim"],
        "attention.value_length_swa": c["head_dim"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "attention.sliding_window": c["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": c["hidden_size_per_layer_input"],
        "final_logit_softcapping": c["final_logit_softcapping"],
        "rope.dimension_count": c["global_head_dim"],
        "rope.dimension_count_swa": c["head_dim"],
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
    }
    if c.get("enable_moe_block"):
        keys |= {
            "expert_count": c["num_experts"],
            "expert_used_count": c["top_k_experts"],
            "expert_feed_forward_length": c["moe_intermediate_size"],
        }
    return keys


def write_keys(writer: gguf.GGUFWriter, keys: dict[str, Any]) -> None:
    """Write keys, to which the architecture's name is added but for the tokenizer's."""
    for key, value in keys.items():
        add: Any = {
            bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
            list: writer.add_array, str: writer.add_string,
        }[type(value)]  # fmt: skip
        add(key if key.startswith("tokenizer.") else f"{writer.arch}.{key}", value)
