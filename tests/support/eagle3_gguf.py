"""GGUF files of EAGLE-3 heads, as llama.cpp's converter writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from tests.reference.eagle3 import TAPS
from tests.support.gguf_files import usual, write_sizes, write_tensors

GGUF_NAMES = {
    "fc": "fc", "input_norm": "enc.output_norm", "norm": "output_norm",
    "embed_tokens": "token_embd", "lm_head": "output", "input_layernorm": "blk.0.attn_norm",
    "hidden_norm": "blk.0.attn_norm_2", "post_attention_layernorm": "blk.0.ffn_norm",
    **{f"self_attn.{x}_proj": f"blk.0.attn_{x}" for x in "qkv"},
    "self_attn.o_proj": "blk.0.attn_output",
    **{f"mlp.{x}_proj": f"blk.0.ffn_{x}" for x in ("gate", "up", "down")},
}  # fmt: skip


def write_gguf_head(
    path: Path,
    raw: dict[str, Any],
    weights: dict[str, Tensor],
    keys: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write a head in F32.

    raw: its config.json. weights: by plain names. keys: writes others, as those of a tokenizer.
    """
    writer = gguf.GGUFWriter(path, "eagle3")
    keys(writer)
    write_sizes(writer, raw, 1)
    writer.add_array("eagle3.target_layers", raw[TAPS])
    writer.add_uint32("eagle3.target_hidden_size", raw["target_hidden_size"])
    for key in ("norm_before_residual", "norm_before_fc"):
        writer.add_bool(f"eagle3.{key}", raw.get(key, False))
    heads = {"q": raw["num_attention_heads"], "k": raw["num_key_value_heads"]}
    tensors = dict[str, Any]()
    for name, value in weights.items():
        if name == "d2t":
            tensors["d2t"] = (value + torch.arange(len(value))).numpy()
            continue
        renamed = GGUF_NAMES[name.removeprefix("layers.0.").removesuffix(".weight")]
        if (part := renamed.rpartition("_")[2]) in heads:  # pairs side by side, as Llama's
            value = value.reshape(heads[part], 2, -1, value.shape[-1]).swapaxes(1, 2).flatten(0, 2)
        tensors[f"{renamed}.weight"] = value.contiguous().numpy()
    write_tensors(writer, tensors, usual(Type.F32))
    return path
