"""GGUF files of DFlash and DSpark heads, as llama.cpp's converter writes them.

Those for DeepSeek-V4 have its layers, others Qwen3's.
"""

from dataclasses import replace
from typing import Any

from mtpbuild.builder.gguf.configs import Config
from mtpbuild.builder.gguf.container import DRAFT_IDS, GgufFile
from mtpbuild.builder.gguf.mapped import GgufWeight
from mtpbuild.builder.gguf.tensors import Architecture
from mtpbuild.builder.models.deepseek_v4.gguf import FLOATS, PARTS, STREAM_HEAD, TENSORS
from mtpbuild.builder.models.deepseek_v4.gguf import read_config as read_stream_config
from mtpbuild.builder.models.dense.gguf import read_dense_config
from mtpbuild.builder.models.dflash.config import CLASSES, MARKOV, NEXT_CLASS, SLIDING
from mtpbuild.runtime.errors import CheckpointError

ARCHITECTURE = "dflash"
MASK, TOKENS = "tokenizer.ggml.mask_token_id", "tokenizer.ggml.tokens"
MARKOV_INPUT = "markov_w1.weight"
# Tensors outside layers, and their names in config.json's makers' files.
TOP = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    MARKOV_INPUT: MARKOV,
    "markov_w2.weight": "markov_head.markov_w2.weight",
    **{f"conf_proj.{kind}": f"confidence_head.proj.{kind}" for kind in ("weight", "bias")},
}
STREAM_TOP = {**TOP, "fc.weight": "main_proj.weight", "enc.output_norm.weight": "main_norm.weight"}
STREAM_TOP |= {f"{STREAM_HEAD}{part}.weight": f"hc_head.hc_{part}" for part in PARTS}
# Keys that change what is computed, by those of config.json, where they are refused.
CHANGES = {
    "hidden_act": "hidden_activation", "input_embedding_scale": "embedding_scale",
    "attention_value_scale": "attention.value_scale", "output_multiplier": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping", "is_causal": "attention.causal",
    "sample_from_anchor": "sample_from_anchor",
}  # fmt: skip


def list_block_heads() -> tuple[Architecture, ...]:
    return (
        Architecture(
            ARCHITECTURE,
            read_head_values,
            TENSORS,
            layers=lambda file: "mtp." if has_streams(file) else "model.layers.",
            restore=restore_weight,
        ),
    )


def has_streams(file: GgufFile) -> bool:
    """Return whether a head's layers are DeepSeek-V4's."""
    return file.key("hyper_connection.count", 0) > 0


def read_head_values(file: GgufFile) -> Config:
    """Return what the head's config.json says."""
    taps = file.key("target_layers", kind=list)  # layers whose inputs are read
    if {*map(type, taps)} != {int}:
        raise CheckpointError(f"{file.path}: target_layers must be a list of integers")
    block = {
        "block_size": file.key("block_size"),
        "target_layer_ids": [i - 1 for i in taps],
        "markov_rank": file.tensors[MARKOV_INPUT].shape[-1] if MARKOV_INPUT in file.tensors else 0,
    }
    tokens, mask = len(file.texts(TOKENS) or ()) or file.key("vocab_size"), file.keys.get(MASK)
    if has_streams(file):
        values = read_stream_config(file, tokens)
        named = {f"dspark_{key}": value for key, value in block.items()}
        return values | named | {"dspark_noise_token_id": mask}
    is_next = f"{ARCHITECTURE}.conv_kernel_size" in file.keys
    return {
        **read_dense_config(file, tokens),
        **block,
        **read_windows(file),
        **{
            ours: value
            for ours, theirs in CHANGES.items()
            if (value := file.keys.get(f"{ARCHITECTURE}.{theirs}")) is not None
        },
        "architectures": [NEXT_CLASS if is_next else CLASSES[0]],
        "tie_word_embeddings": False,  # head and embedding are the trunk's
        "mask_token_id": mask,
        "draft_vocab_size": file.tensor(DRAFT_IDS).shape[0] if DRAFT_IDS in file.tensors else None,
    }


def read_windows(file: GgufFile) -> dict[str, Any]:
    """Return which layers have a window, and its size; {} if none has one."""
    if not (window := file.key("attention.sliding_window", 0)):
        return {}
    slides = file.key("attention.sliding_window_pattern", kind=list)
    kinds = [SLIDING if slide else "full_attention" for slide in slides]
    return {"layer_types": kinds, "sliding_window": window, "use_sliding_window": True}


def restore_weight(file: GgufFile, tensor: str, weight: GgufWeight) -> GgufWeight:
    """Return a weight under the name that it has in safetensors files."""
    if not has_streams(file):
        return replace(weight, name=TOP.get(tensor, weight.name))
    name = weight.name
    if tensor in STREAM_TOP:  # of the first layer and of the last one
        first = tensor in ("fc.weight", "enc.output_norm.weight")
        name = f"mtp.{0 if first else file.layers - 1}.{STREAM_TOP[tensor]}"
    return replace(weight, name=name, as_floats=weight.as_floats or name.endswith(FLOATS))
