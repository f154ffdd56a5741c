"""GGUF files of DFlash and DSpark heads, as llama.cpp's converter writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from tests.reference.dflash import SLIDING
from tests.support.dense_gguf import GGUF_NAMES
from tests.support.gguf_files import usual, write_sizes, write_tensors

NAMES = {
    "fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm",
    "markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
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
    writer, nested = gguf.GGUFWriter(path, "dflash"), raw["dflash_config"]
    keys(writer)
    writer.add_mask_token_id(nested["mask_token_id"])
    write_sizes(writer, raw, raw["num_hidden_layers"])
    writer.add_uint32("dflash.block_size", raw["block_size"])
    # The layers whose inputs are read.
    writer.add_array("dflash.target_layers", [i + 1 for i in nested["target_layer_ids"]])
    if raw.get("use_sliding_window"):
        writer.add_sliding_window(raw["sliding_window"])
        writer.add_sliding_window_pattern([kind == SLIDING for kind in raw["layer_types"]])
    tensors = dict[str, Any]()
    for name, value in weights.items():
        bare = name.removesuffix(".weight")
        _, i, rest = bare.split(".", 2) if bare.startswith("layers.") else ("", "", "")
        renamed = f"blk.{i}.{GGUF_NAMES[rest]}" if rest else NAMES[bare]
        tensors[f"{renamed}.weight"] = value.contiguous().numpy()
    write_tensors(writer, tensors, usual(Type.F32))
    return path
