"""GGUF files of DeepSeek-V4, in the names of llama.cpp.

The MTP module is in a file of its own, whose weights that sum the streams are the module's.
"""

from collections.abc import Iterator
from dataclasses import replace

from mtpbuild.builder.gguf.configs import Config, read_rope, read_sizes
from mtpbuild.builder.gguf.container import GgufFile
from mtpbuild.builder.gguf.mapped import Columns, GgufWeight
from mtpbuild.builder.gguf.tensors import (
    LAYER,
    MODULE_LAYER,
    SHARED_EXPERTS,
    Architecture,
    LayerTensors,
    check_shape,
)
from mtpbuild.builder.gguf.tokenizer import WordSplit
from mtpbuild.builder.models.deepseek_v3.gguf import WORDS
from mtpbuild.runtime.errors import CheckpointError

SQRT_SOFTPLUS = 4  # of `expert_gating_func`
STREAM_HEAD = "output_hc_"
PARTS = ("fn", "base", "scale")  # of what weighs the streams
ATTENTION, JOIN = "self_attn", "nextn.eh_proj.weight"
COMPRESSOR, INDEXER = f"{ATTENTION}.compressor", f"{ATTENTION}.compressor.indexer"
TENSORS = LAYER | SHARED_EXPERTS | MODULE_LAYER | {
    **{f"attn_{x}": f"{ATTENTION}.{x}_proj" for x in ("q_a", "q_b", "kv")},
    "attn_q_a_norm": f"{ATTENTION}.q_a_norm",
    "attn_kv_a_norm": f"{ATTENTION}.kv_norm",
    **{f"attn_output_{x}": f"{ATTENTION}.o_{x}_proj" for x in "ab"},
    "attn_sinks.weight": f"{ATTENTION}.sinks",
    **{f"hc_{x}_{part}.weight": f"{x}_hc.{part}" for x in ("attn", "ffn") for part in PARTS},
    **{f"attn_compressor_{x}": f"{COMPRESSOR}.{x}_proj" for x in ("kv", "gate")},
    "attn_compressor_ape.weight": f"{COMPRESSOR}.position_bias",
    "attn_compressor_norm": f"{COMPRESSOR}.kv_norm",
    **{f"indexer_compressor_{x}": f"{INDEXER}.{x}_proj" for x in ("kv", "gate")},
    "indexer_compressor_ape.weight": f"{INDEXER}.position_bias",
    "indexer_compressor_norm": f"{INDEXER}.kv_norm",
    "indexer.attn_q_b": f"{INDEXER}.q_b_proj",
    "indexer.proj": f"{INDEXER}.scorer.weights_proj",
    "ffn_gate_tid2eid.weight": "mlp.gate.tid2eid",
    "nextn.shared_head_norm": "norm",
    **{f"{STREAM_HEAD}{part}.weight": f"hc_head.hc_{part}" for part in PARTS},
}  # fmt: skip
TOP = {f"{STREAM_HEAD}{part}.weight": f"model.hc_head.hc_{part}" for part in PARTS}
# Weights that files may have quantised, but the checkpoint and engines have in floats.
FLOATS = (".fn", "hc_fn", "position_bias", "tid2eid")


def list_architectures() -> tuple[Architecture, ...]:
    return (
        Architecture(
            "deepseek4",
            read_config,
            TENSORS,
            splits={"joyai-llm": WordSplit(WORDS)},
            modules="mtp.",
            module_tops=STREAM_HEAD,
            merge=split_joint,
            restore=rename_weight,
        ),
    )


def rename_weight(file: GgufFile, tensor: str, weight: GgufWeight) -> GgufWeight:
    name = TOP.get(weight.name, weight.name)
    return replace(weight, name=name, as_floats=weight.as_floats or name.endswith(FLOATS))


def split_joint(file: GgufFile, layer: str, tensors: LayerTensors) -> Iterator[GgufWeight]:
    """Yield the projections of the token and of the streams, which a file has side by side."""
    if (joint := tensors.pop(JOIN, None)) is None:
        return
    width = file.key("embedding_length")
    check_shape(joint, joint.shape == (width, 2 * width))
    for i, kind in enumerate("eh"):
        name = f"{layer}.{kind}_proj.weight"
        yield GgufWeight(name, (width, width), (joint,), columns=Columns(i * width, width))


def read_config(file: GgufFile, tokens: int | None = None) -> Config:
    """Return what config.json says, in the published spelling.

    tokens: the size of the vocabulary, if the file may have no embedding.
    """
    if (scores := file.key("expert_gating_func")) != SQRT_SOFTPLUS:
        raise CheckpointError(f"{file.path}: expert_gating_func {scores} is not {SQRT_SOFTPLUS}")
    # YaRN does not scale cosines here, which the configuration reads from a missing factor.
    rope = {key: value for key, value in read_rope(file).items() if value is not None}
    return {
        **read_sizes(file, tokens),
        "head_dim": file.key("attention.key_length"),
        "qk_rope_head_dim": file.key("rope.dimension_count"),
        "q_lora_rank": file.key("attention.q_lora_rank"),
        "o_groups": file.key("attention.output_group_count"),
        "o_lora_rank": file.key("attention.output_lora_rank"),
        "sliding_window": file.key("attention.sliding_window"),
        "compress_ratios": file.key("attention.compress_ratios", kind=list),
        "compress_rope_theta": file.key("attention.compress_rope_freq_base", kind=float),
        "index_n_heads": file.key("attention.indexer.head_count"),
        "index_head_dim": file.key("attention.indexer.key_length"),
        "index_topk": file.key("attention.indexer.top_k"),
        "hc_mult": file.key("hyper_connection.count"),
        "hc_sinkhorn_iters": file.key("hyper_connection.sinkhorn_iterations"),
        "hc_eps": file.key("hyper_connection.epsilon", kind=float),
        "num_hash_layers": file.key("hash_layer_count", 0),
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope,
        "swiglu_limit": read_limit(file),
        "moe_intermediate_size": file.key("expert_feed_forward_length"),
        "n_routed_experts": file.key("expert_count"),
        "n_shared_experts": file.key("expert_shared_count"),
        "num_experts_per_tok": file.key("expert_used_count"),
        "routed_scaling_factor": file.key("expert_weights_scale", 1.0),
        "norm_topk_prob": file.key("expert_weights_norm", False),
        "scoring_func": "sqrtsoftplus",
        "num_nextn_predict_layers": file.modules,
    }


def read_limit(file: GgufFile) -> float:
    """Return the clamp of gates and ups, which all layers and their shared experts have."""
    limits = file.key("swiglu_clamp_exp", kind=list)
    if len(every := {*limits, *file.key("swiglu_clamp_shexp", limits)}) != 1:
        raise CheckpointError(f"{file.path}: layers clamp experts at {len(every)} limits")
    limit: float = every.pop()
    return limit
