"""GGUF files of Gemma-4 and of its assistant, in the names of llama.cpp and of ik_llama.cpp.

Values are as the checkpoint has them. Layers that see all rows rotate a part of their pairs, which
files tell by one factor per pair: 1, or infinity as good as. Keys have one value for all layers or
one for each.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mtpbuild.builder.gguf.configs import Config, read_rope, read_sizes
from mtpbuild.builder.gguf.container import GgufFile
from mtpbuild.builder.gguf.mapped import GgufWeight
from mtpbuild.builder.gguf.tensors import LAYER, Architecture
from mtpbuild.builder.gguf.tokenizer import WordSplit
from mtpbuild.builder.models.gemma4.assistant_config import TYPES
from mtpbuild.builder.models.gemma4.config import FULL, LAYER_CONFIGS, LAYER_TABLE, SLIDING
from mtpbuild.runtime.errors import CheckpointError

FACTORS, TABLE = "rope_freqs.weight", "per_layer_token_embd.weight"
STILL = 1e30  # the factor of pairs that do not turn
PATTERN, SHARED = "attention.sliding_window_pattern", "attention.shared_kv_layers"
TENSORS = LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
TOP = {  # tensors outside layers
    TABLE: LAYER_TABLE,
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
    **{f"nextn.{x}_projection.weight": f"{x}_projection.weight" for x in ("pre", "post")},
    **{f"mtp_{x}_proj.weight": f"{x}_projection.weight" for x in ("pre", "post")},
}
OTHER_HEAD = "gemma4_mtp"  # ik_llama.cpp's
ENDS = "<turn|>", "<|tool_response>"  # generation_config.json names them, no key does


def list_architectures() -> tuple[Architecture, ...]:
    split = WordSplit((), adds_bos=True, spaced=True, ends=ENDS)
    return (
        Architecture(
            "gemma4",
            read_text_config,
            TENSORS,
            splits={"gemma4": split},
            experts="experts",
            restore=restore,
        ),
    )


def list_heads() -> tuple[Architecture, ...]:
    head = Architecture("gemma4-assistant", read_head_config, TENSORS, restore=restore)
    return head, replace(head, name=OTHER_HEAD)


def restore(file: GgufFile, tensor: str, weight: GgufWeight) -> GgufWeight:
    """Return a weight under the checkpoint's name; a router is read as floats."""
    router = weight.name.endswith("router.proj.weight")
    return replace(weight, name=TOP.get(tensor, weight.name), as_floats=router)


def read_head_config(file: GgufFile) -> Config:
    """Return what the head's config.json says; without its groups of tokens."""
    others = file.architecture == OTHER_HEAD
    return {
        "model_type": TYPES[0],
        "backbone_hidden_size": file.key(
            "backbone_embedding_length" if others else "embedding_length_out"
        ),
        "text_config": read_text_config(file),
    }


def read_text_config(file: GgufFile) -> Config:
    """Return what the config.json of a trunk says, and the `text_config` of a head."""
    slides = read_layers(file, PATTERN)
    if {*map(type, slides)} != {bool}:
        raise CheckpointError(f"{file.path}: {PATTERN} must be a list of truth values")
    near, far = read_key_heads(file, slides)
    inner = read_inner_sizes(file)
    # Layers without values take their keys; those that share rows have neither.
    first_shared = file.layers - inner["num_kv_shared_layers"]
    full = [i for i, slide in enumerate(slides[:first_shared]) if not slide]
    inputs = file.key("embedding_length_per_layer_input", 0)
    width = file.key("attention.key_length")
    return {
        **read_sizes(file),
        **inner,
        **read_mixture(file),
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [SLIDING if slide else FULL for slide in slides],
        "sliding_window": file.key("attention.sliding_window"),
        "head_dim": file.key("attention.key_length_swa"),
        "num_key_value_heads": near,
        LAYER_CONFIGS: {FULL: {"head_dim": width, "num_key_value_heads": far}},
        "attention_k_eq_v": not any(f"blk.{i}.attn_v.weight" in file.tensors for i in full),
        "rope_parameters": read_rotations(file),
        "hidden_size_per_layer_input": inputs,
        "vocab_size_per_layer_input": file.tensor(TABLE).shape[0] if inputs else 0,
        "final_logit_softcapping": file.key("final_logit_softcapping", 30.0),
    }


def read_mixture(file: GgufFile) -> Config:
    """Return the numbers of experts; {} if there are none."""
    if not (count := file.key("expert_count", 0)):
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": file.key("expert_used_count"),
        "moe_intermediate_size": file.key("expert_feed_forward_length"),
    }


def read_layers(file: GgufFile, name: str) -> list[Any]:
    """Return a key's value for each layer; one number is that of all."""
    key = f"{file.architecture}.{name}"
    if type(file.keys.get(key)) is int:
        return [file.key(name)] * file.layers
    values: list[Any] = file.key(name, kind=list)
    if len(values) != file.layers:
        raise CheckpointError(
            f"{file.path}: key {key} has {len(values)} values for {file.layers} layers"
        )
    return values


def read_key_heads(file: GgufFile, slides: Sequence[bool]) -> tuple[Any, Any]:
    """Return the heads of keys in layers with a window, and in the others."""
    counts = read_layers(file, "attention.head_count_kv")
    kinds = [
        {count for count, slide in zip(counts, slides, strict=True) if slide is kind}
        for kind in (True, False)
    ]
    if any(len(kind) > 1 for kind in kinds):
        raise CheckpointError(f"{file.path}: layers of one kind have {counts} heads of keys")
    near, far = (next(iter(kind), None) for kind in kinds)
    return near or far, far or near


def read_inner_sizes(file: GgufFile) -> Config:
    """Return the inner sizes of MLPs, which may be twice as wide in layers that share rows."""
    sizes, shared = read_layers(file, "feed_forward_length"), file.key(SHARED, 0)
    usual, last = sizes[0], sizes[-1]
    narrow = max(0, file.layers - shared) if last == 2 * usual else file.layers
    if sizes != [usual] * narrow + [last] * (file.layers - narrow):
        raise CheckpointError(f"{file.path}: layers have MLPs of {sizes}, which is not supported")
    wide = last != usual
    return {
        "intermediate_size": usual,
        "use_double_wide_mlp": wide,
        "num_kv_shared_layers": shared,
    }


def read_rotations(file: GgufFile) -> Config:
    """Return the rotary embedding of both kinds of layers."""
    rope = read_rope(file)
    for end in ("", "_swa"):
        width = file.key(f"attention.key_length{end}")
        rotated = file.key(f"rope.dimension_count{end}", width)
        if rotated != width or rope["rope_type"] != "default":
            raise CheckpointError(
                f"{file.path}: a {rope['rope_type']} rotation of {rotated} values of {width} is "
                "not supported"
            )
    full = {**rope, "rope_type": "proportional", **read_share(file)}
    return {FULL: full, SLIDING: {"rope_theta": file.key("rope.freq_base_swa", 10000.0)}}


def read_share(file: GgufFile) -> Config:
    """Return which part of a head's pairs turns; files of one kind leave it to be the usual one."""
    if file.architecture == OTHER_HEAD and FACTORS not in file.tensors:
        return {}
    width, tensor = file.key("attention.key_length"), file.tensor(FACTORS)
    factors = tensor.decode(tensor.read()).ravel()
    turning = int((factors == 1).sum())
    fits = factors.size == width // 2 and (factors[:turning] == 1).all()
    if not fits or (factors[turning:] != np.float32(STILL)).any():
        raise CheckpointError(f"{file.path}: {FACTORS} are not 1 up to a pair and {STILL:g} after")
    return {"partial_rotary_factor": 2 * turning / width}
