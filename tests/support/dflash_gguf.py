"""GGUF files of DFlash and DSpark heads, as llama.cpp's converter writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from tests.support.dense_gguf import GGUF_NAMES
from tests.support.gguf_files import usual, write_tensors

NAMES = {
    "fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm",
    "markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}  # fmt: skip


def write_gguf_head(
    path: Path,
    raw: dict[str, Any],
    weights: dict[str, Tensor],
    keys: Callable[[gguf.GGUFWriter], None],
) -> Path:
    """Write a head in F32.

    raw: its config.json. weights: by plain names. keys: writes others, as those of a tokenizer.
    """
    writer, nested = gguf.GGUFWriter(path, "dflash"), raw["dflash_config"]
    keys(writer)
    writer.add_mask_token_id(nested["mask_token_id"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_vocab_size(raw["vocab_size"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(raw["head_dim"])
    writer.add_value_length(raw["head_dim"])
    writer.add_rope_dimension_count(raw["head_dim"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_theta"])
    writer.add_uint32("dflash.block_size", raw["block_size"])
    # The layers whose inputs are read.
    writer.add_array("dflash.target_layers", [i + 1 for i in nested["target_layer_ids"]])
    tensors = dict[str, Any]()
    for name, value in weights.items():
        bare = name.removesuffix(".weight")
        _, i, rest = bare.split(".", 2) if bare.startswith("layers.") else ("", "", "")
        renamed = f"blk.{i}.{GGUF_NAMES[rest]}" if rest else NAMES[bare]
        tensors[f"{renamed}.weight"] = value.contiguous().numpy()
    write_tensors(writer, tensors, usual(Type.F32))
    return path
