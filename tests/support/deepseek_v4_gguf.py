"""Writes GGUF files of DeepSeek-V4 as llama.cpp's converter does: a trunk, and a head beside it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from torch import Tensor

from tests.support.gguf_files import Array, TypeOf, usual, write_tensors
from tests.support.scripts import benchmark

NAMES = {  # of a layer, DeepSeek's and GGUF's
    "attn.attn_sink": "attn_sinks.weight",
    "attn.compressor.ape": "attn_compressor_ape.weight",
    "attn.indexer.compressor.ape": "indexer_compressor_ape.weight",
    "ffn.gate.bias": "exp_probs_b.bias",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
    "norm.weight": "nextn.shared_head_norm.weight",
    **{f"{x}norm.weight": f"nextn.{x}norm.weight" for x in "eh"},
    **{
        f"hc_{x}_{part}": f"hc_{x}_{part}.weight"
        for x in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    },
    **{
        f"{theirs}.weight": f"{ours}.weight"
        for theirs, ours in {
            "attn_norm": "attn_norm", "ffn_norm": "ffn_norm", "ffn.gate": "ffn_gate_inp",
            "attn.wq_a": "attn_q_a", "attn.wq_b": "attn_q_b", "attn.q_norm": "attn_q_a_norm",
            "attn.wkv": "attn_kv", "attn.kv_norm": "attn_kv_a_norm",
            "attn.wo_a": "attn_output_a", "attn.wo_b": "attn_output_b",
            "attn.compressor.wkv": "attn_compressor_kv",
            "attn.compressor.wgate": "attn_compressor_gate",
            "attn.compressor.norm": "attn_compressor_norm",
            "attn.indexer.wq_b": "indexer.attn_q_b",
            "attn.indexer.weights_proj": "indexer.proj",
            "attn.indexer.compressor.wkv": "indexer_compressor_kv",
            "attn.indexer.compressor.wgate": "indexer_compressor_gate",
            "attn.indexer.compressor.norm": "indexer_compressor_norm",
            "ffn.shared_experts.w1": "ffn_gate_shexp",
            "ffn.shared_experts.w2": "ffn_down_shexp",
            "ffn.shared_experts.w3": "ffn_up_shexp",
        }.items()
    },
}  # fmt: skip
ENDS = {"embed.weight": "token_embd.weight", "norm.weight": "output_norm.weight"} | {
    "head.weight": "output.weight"
}
DSPARK_ENDS = {  # of the first and the last stage
    "main_proj.weight": "fc.weight", "main_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight", "confidence_head.proj.weight": "conf_proj.weight",
    **{f"markov_head.markov_w{i}.weight": f"markov_w{i}.weight" for i in (1, 2)},
    **{f"hc_head_{part}": f"output_hc_{part}.weight" for part in ("fn", "base", "scale")},
}  # fmt: skip
STREAM_HEAD = re.compile(r"(?:mtp\.0\.)?hc_head_(fn|base|scale)")
EXPERTS = {"w1": "gate", "w2": "down", "w3": "up"}


def convert(tensors: dict[str, Tensor], raw: dict[str, Any], *, head: bool) -> dict[str, Array]:
    """Return the tensors of a trunk's file, or of its head's, from DeepSeek's names."""
    converted, count = dict[str, Tensor](), raw["n_routed_experts"]
    for name, value in tensors.items():
        in_head = name.startswith("mtp.")
        if name in ENDS:
            converted[ENDS[name]] = value
        elif in_head is not head:
            continue
        elif match := STREAM_HEAD.fullmatch(name):
            converted[f"output_hc_{match[1]}.weight"] = value
        else:
            block = name.replace("mtp.0.", f"layers.{raw['num_hidden_layers']}.")
            _, number, stem = block.split(".", 2)
            if stem in NAMES:
                converted[f"blk.{number}.{NAMES[stem]}"] = value
            elif match := re.fullmatch(r"ffn\.experts\.0\.(w\d)\.weight", stem):
                stack = [tensors[name.replace(".0.w", f".{e}.w")] for e in range(count)]
                converted[f"blk.{number}.ffn_{EXPERTS[match[1]]}_exps.weight"] = torch.stack(stack)
            elif stem == "e_proj.weight":
                both = [value, tensors[name.replace("e_proj", "h_proj")]]
                converted[f"blk.{number}.nextn.eh_proj.weight"] = torch.cat(both, 1)
    return {
        name: value.numpy().astype(np.int32 if value.dtype == torch.int64 else np.float32)
        for name, value in converted.items()
    }


def convert_dspark(tensors: dict[str, Tensor], raw: dict[str, Any]) -> dict[str, Array]:
    """Return the tensors of a DSpark head's file: its stages are the layers of a trunk."""
    stages, ends = dict[str, Tensor](), dict[str, Tensor]()
    for name, value in tensors.items():
        if name.startswith("mtp."):
            stem = name.split(".", 2)[2]
            if stem in DSPARK_ENDS:
                ends[DSPARK_ENDS[stem]] = value
            else:
                stages[name.replace("mtp.", "layers.", 1)] = value
    floats = {name: value.float().numpy() for name, value in ends.items()}
    return floats | convert(stages, raw, head=False)


def list_keys(raw: dict[str, Any], *, head: bool) -> dict[str, Any]:
    """Return the keys of a published configuration, without the architecture's name."""
    blocks = raw["num_hidden_layers"] + head
    keys = {
        "vocab_size": raw["vocab_size"],
        "block_count": blocks,
        "context_length": raw["max_position_embeddings"],
        "embedding_length": raw["hidden_size"],
        "attention.head_count": raw["num_attention_heads"],
        "attention.head_count_kv": 1,
        "attention.key_length": raw["head_dim"],
        "attention.value_length": raw["head_dim"],
        "attention.layer_norm_rms_epsilon": raw["rms_norm_eps"],
        "attention.q_lora_rank": raw["q_lora_rank"],
        "attention.sliding_window": raw["sliding_window"],
        "attention.output_group_count": raw["o_groups"],
        "attention.output_lora_rank": raw["o_lora_rank"],
        "attention.compress_ratios": raw["compress_ratios"],
        "attention.compress_rope_freq_base": float(raw["compress_rope_theta"]),
        "attention.indexer.head_count": raw["index_n_heads"],
        "attention.indexer.key_length": raw["index_head_dim"],
        "attention.indexer.top_k": raw["index_topk"],
        "hyper_connection.count": raw["hc_mult"],
        "hyper_connection.sinkhorn_iterations": raw["hc_sinkhorn_iters"],
        "hyper_connection.epsilon": raw["hc_eps"],
        "hash_layer_count": raw["num_hash_layers"],
        "embedding_length_out": raw["hc_mult"] * raw["hidden_size"],
        "rope.dimension_count": raw["qk_rope_head_dim"],
        "rope.freq_base": raw["rope_theta"],
        "expert_count": raw["n_routed_experts"],
        "expert_used_count": raw["num_experts_per_tok"],
        "expert_feed_forward_length": raw["moe_intermediate_size"],
        "expert_shared_count": raw["n_shared_experts"],
        "expert_weights_scale": raw["routed_scaling_factor"],
        "expert_weights_norm": raw["norm_topk_prob"],
        "expert_gating_func": 4,
        "swiglu_clamp_exp": [raw["swiglu_limit"]] * blocks,
        "swiglu_clamp_shexp": [raw["swiglu_limit"]] * blocks,
    }
    if scaling := raw.get("rope_scaling"):
        keys |= {
            "rope.scaling.type": scaling["type"],
            "rope.scaling.factor": scaling["factor"],
            "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        }
    return keys | ({"nextn_predict_layers": 1} if head else {})


def list_dspark_keys(raw: dict[str, Any], stages: int) -> dict[str, Any]:
    """Return the keys of a DSpark head, which has those of a trunk of its stages."""
    changes = {"num_hidden_layers": stages, "compress_ratios": [0] * stages, "num_hash_layers": 0}
    keys = list_keys(raw | changes, head=False)
    del keys["embedding_length_out"]
    return keys | {
        "block_size": raw["dspark_block_size"],
        # The layers whose inputs are read.
        "target_layers": [i + 1 for i in raw["dspark_target_layer_ids"]],
        "tokenizer.ggml.mask_token_id": raw["dspark_noise_token_id"],
    }


def write(
    path: Path,
    folder: Path,
    *,
    head: bool = False,
    stages: int = 0,
    type_of: TypeOf | None = None,
    keys: dict[str, Any] | None = None,
    more: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write a file of a checkpoint in DeepSeek's spelling.

    head: its MTP module's. stages: layers of its DSpark head, whose file is to be written. keys: in
    the place of others.
    """
    path.parent.mkdir(exist_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    listed = list_dspark_keys(raw, stages) if stages else list_keys(raw, head=head)
    tensors = convert_dspark(stored, raw) if stages else convert(stored, raw, head=head)
    writer = gguf.GGUFWriter(path, "dflash" if stages else "deepseek4")
    benchmark("gguf_gemma4").write_keys(writer, listed | (keys or {}))
    if more is not None:
        more(writer)
    write_tensors(writer, tensors, type_of or usual(Type.F32))
    return path
