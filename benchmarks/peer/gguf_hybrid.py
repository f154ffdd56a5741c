"""Names and values of a Qwen3.5 checkpoint's tensors in GGUF, with its MTP module.

llama.cpp stores tensors as it computes with them. Norms are factors (a checkpoint stores the factor
minus 1, except for the delta rule's own norm), the decay is a rate, and convolutions lack the axis
of length 1. The module is one more layer of attention.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Reader = Callable[[str], Array]

# Tensors of a layer: GGUF's name and the checkpoint's.
LAYER = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
}
DELTA_RULE = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
MODULE = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}


def tensors(c: dict[str, Any], read: Reader) -> Iterator[tuple[str, Array]]:
    """Yield GGUF's names and their values.

    Raises:
        SystemExit: value heads share key heads; llama.cpp wants these in another order.
    """
    if c["linear_num_key_heads"] != c["linear_num_value_heads"]:
        raise SystemExit("value heads that share a key head are not converted")

    def take(at: str, to: str, names: dict[str, str]) -> Iterator[tuple[str, Array]]:
        for name, source in names.items():
            yield f"{to}.{name}.weight", weight(read, f"{at}.{source}.weight")

    yield "token_embd.weight", read("model.embed_tokens.weight")
    yield "output_norm.weight", weight(read, "model.norm.weight")
    if not c["tie_word_embeddings"]:
        yield "output.weight", read("lm_head.weight")
    layers = c["num_hidden_layers"]
    for i in range(layers):
        at, to = f"model.layers.{i}", f"blk.{i}"
        yield from take(at, to, LAYER)
        if (i + 1) % c["full_attention_interval"] == 0:
            yield from take(at, to, ATTENTION)
            continue
        yield from take(at, to, DELTA_RULE)
        yield f"{to}.ssm_dt.bias", read(f"{at}.linear_attn.dt_bias")
        yield f"{to}.ssm_a", -np.exp(read(f"{at}.linear_attn.A_log"))
    to = f"blk.{layers}"
    yield from take("mtp.layers.0", to, LAYER | ATTENTION)
    yield from take("mtp", to, MODULE)


def weight(read: Reader, name: str) -> Array:
    """Read a tensor in the form in which llama.cpp computes with it."""
    found = read(name)
    if name.endswith("conv1d.weight"):
        return found[:, 0]
    is_norm = found.ndim == 1 and not name.endswith("linear_attn.norm.weight")
    return found + 1 if is_norm else found
