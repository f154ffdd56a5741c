"""GGUF files of dense models, as llama.cpp's converter writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from mtpbuild.builder.models.common.plain import PlainCausalLM
from tests.support.gguf_files import usual, write_tensors

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}  # fmt: skip
GGUF_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}  # fmt: skip


def permute(weight: Tensor, heads: int) -> Tensor:
    """Put each head's pairs (i, i + d / 2) side by side, as converters of Llama do."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write_dense(
    path: Path,
    c: dict[str, Any],
    model: PlainCausalLM,
    factors: npt.NDArray[np.float32] | None = None,
    keys: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write a model in F32.

    c: its config.json. factors: `rope_freqs`. keys: writes others, as those of a tokenizer.
    """
    writer = gguf.GGUFWriter(path, name := c["model_type"])
    keys(writer)
    width = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(c.get("rope_theta", 1000000.0))
    counts = {"q": c["num_attention_heads"], "k": c["num_key_value_heads"]}
    tensors = dict[str, npt.NDArray[np.float32]]()
    for tensor, value in model.state_dict().items():
        if tensor == "lm_head.weight" and c.get("tie_word_embeddings"):
            continue
        if tensor in NAMES:
            tensors[NAMES[tensor]] = value.numpy()
            continue
        _, _, layer, rest = tensor.split(".", 3)
        part, _, ending = rest.rpartition(".")
        head = part.removeprefix("self_attn.").removesuffix("_proj")
        if name == "llama" and head in counts:
            value = permute(value, counts[head])
        tensors[f"blk.{layer}.{GGUF_NAMES[part]}.{ending}"] = value.contiguous().numpy()
    if factors is not None:
        tensors["rope_freqs.weight"] = factors
    write_tensors(writer, tensors, usual(Type.F32))
    return path
