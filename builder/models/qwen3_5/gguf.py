"""GGUF files of Qwen3.5, its mixtures of experts, and Qwen3-Next.

Converters change values: norms are factors, the decay is a rate, and Qwen3.5's value heads that
share a key head are tiled. Here that is undone.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mtpbuild.builder.gguf.configs import Config, read_heads, read_sizes
from mtpbuild.builder.gguf.container import Floats, GgufFile
from mtpbuild.builder.gguf.mapped import GgufWeight, Order, Tiles
from mtpbuild.builder.gguf.tensors import LAYER, Architecture, LayerTensors, check_shape
from mtpbuild.builder.gguf.tokenizer import WordSplit, split_words
from mtpbuild.builder.lazy_torch import torch

TENSORS = LAYER | {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    **{f"ffn_{x}_shexp": f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}
MODULES = "mtp.layers."
# Products that engines of quantised checkpoints keep in floats: exponents, and a router.
AS_FLOATS = re.compile(r".*(in_proj_(a|b)|shared_expert_gate)\.weight")


def list_architectures() -> tuple[Architecture, ...]:
    dense = Architecture(
        "qwen35",
        lambda file: read_gguf_config(file, "Qwen3_5", "qwen3_5_text", moe=False),
        TENSORS,
        modules=MODULES,
        splits={"qwen35": WordSplit((split_words(r"[\p{L}\p{M}]"),), normalised=True)},
        restore=restore_tiled,
    )
    experts = replace(
        dense,
        name="qwen35moe",
        config=lambda file: read_gguf_config(file, "Qwen3_5Moe", "qwen3_5_moe_text"),
    )
    older = Architecture(
        "qwen3next",
        lambda file: read_gguf_config(file, "Qwen3Next", "qwen3_next"),
        TENSORS,
        modules=MODULES,
        splits={"qwen2": WordSplit((split_words(r"\p{L}"),), normalised=True)},
        merge=merge_packed,
        restore=restore,
    )
    return dense, experts, older


def read_gguf_config(file: GgufFile, name: str, model_type: str, moe: bool = True) -> Config:
    values = file.key("ssm.time_step_rank")
    experts: Config = {} if not moe else {
        "num_experts": file.key("expert_count"),
        "num_experts_per_tok": file.key("expert_used_count"),
        "moe_intermediate_size": file.key("expert_feed_forward_length"),
        "shared_expert_intermediate_size": file.key("expert_shared_feed_forward_length", 0),
        "norm_topk_prob": file.key("expert_weights_norm", True),
    }  # fmt: skip
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model_type,
        **read_sizes(file),
        **read_heads(file),
        "intermediate_size": file.key("feed_forward_length", 0) or 1,
        "full_attention_interval": file.key("full_attention_interval", 4),
        "linear_conv_kernel_dim": file.key("ssm.conv_kernel"),
        "linear_key_head_dim": file.key("ssm.state_size"),
        "linear_num_key_heads": file.key("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": file.key("ssm.inner_size") // values,
        **experts,
        "mtp_num_hidden_layers": file.modules,
    }


def restore(file: GgufFile, tensor: str, weight: GgufWeight) -> GgufWeight:
    """Return a weight with the values and the shape that the checkpoint has."""
    name, shape = weight.name, weight.shape
    if AS_FLOATS.fullmatch(name):
        weight = replace(weight, as_floats=True)
    if name.endswith("conv1d.weight") and len(shape) == 2:
        return replace(weight, shape=(shape[0], 1, shape[1]))
    if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
        return replace(weight, shape=(1, *shape))
    if name.endswith(".A_log"):
        return replace(weight, change=log_of_rate)
    if "norm" in name and not name.endswith("linear_attn.norm.weight"):
        return replace(weight, change=without_one)
    return weight


def restore_tiled(file: GgufFile, tensor: str, weight: GgufWeight) -> GgufWeight:
    """Do the same, and put value heads in order."""
    return replace(restore(file, tensor, weight), **order_of_value_heads(file, tensor))


def order_of_value_heads(file: GgufFile, tensor: str) -> dict[str, Any]:
    """Return the order of a tensor's value heads, for those that have any."""
    keys, values = file.key("ssm.group_count"), file.key("ssm.time_step_rank")
    if keys == values:
        return {}
    repeats, width = values // keys, file.key("ssm.inner_size") // values
    match tensor:
        case "attn_qkv.weight" | "ssm_conv1d.weight":
            before = 2 * keys * file.key("ssm.state_size")
            return {"rows": Tiles(keys, repeats, width, before).grouped}
        case "attn_gate.weight":
            return {"rows": Tiles(keys, repeats, width).grouped}
        case "ssm_alpha.weight" | "ssm_beta.weight":
            return {"rows": Tiles(keys, repeats, 1).grouped}
        case "ssm_a" | "ssm_dt.bias":
            return {"columns": Tiles(keys, repeats, 1)}
        case "ssm_out.weight":
            return {"columns": Tiles(keys, repeats, width)}
    return {}


def merge_packed(file: GgufFile, layer: str, tensors: LayerTensors) -> Iterator[GgufWeight]:
    """Yield Qwen3-Next's projections, which the checkpoint has one key head after the other."""
    at = f"{layer}.linear_attn"
    if "ssm_ba.weight" in tensors:
        ba = tensors.pop("ssm_ba.weight")
        yield GgufWeight(f"{at}.in_proj_ba.weight", ba.shape, (ba,), as_floats=True)
    if not {"attn_qkv.weight", "attn_gate.weight"} <= tensors.keys():
        return
    qkv, z = tensors.pop("attn_qkv.weight"), tensors.pop("attn_gate.weight")
    check_shape(z, len(qkv.shape) == 2 and z.shape[1:] == qkv.shape[1:])
    keys, width = file.key("ssm.group_count"), file.key("ssm.state_size")
    values = file.key("ssm.inner_size") // keys  # of a key head
    shape = (qkv.shape[0] + z.shape[0], qkv.shape[1])
    rows = partial(join_kinds, keys, (width, width, values, values))
    yield GgufWeight(f"{at}.in_proj_qkvz.weight", shape, (qkv, z), rows=rows)


def join_kinds(keys: int, sizes: Sequence[int]) -> Order:
    """Return rows that lie kind by kind, in the order of key heads."""
    kinds = []
    start = 0
    for size in sizes:
        kinds.append(start + np.arange(keys * size).reshape(keys, size))
        start += keys * size
    return np.concatenate(kinds, axis=1).ravel()


def without_one(factor: Floats) -> Floats:
    """Return a norm's weight: 1 plus it gives the factor again, exactly."""
    return factor - np.float32(1)


def log_of_rate(rate: Floats) -> Floats:
    """Return the logarithms whose exponentials are the rates: -rate is stored.

    Of the floats near the logarithm the one is taken whose exponential is nearest to the rate, so
    that a rate that was made from a float gives it back.
    """
    positive = -rate
    middle = np.log(positive.astype(np.float64)).astype(np.float32)
    near = [middle]
    for direction in (-np.inf, np.inf):
        step = middle
        for _ in range(4):
            step = np.nextafter(step, np.float32(direction))
            near.append(step)
    logarithms = np.stack(near)
    rates = torch.from_numpy(logarithms).exp().numpy().astype(np.float64)
    nearest = np.abs(rates - positive).argmin(0)[None]
    best: Floats = np.take_along_axis(logarithms, nearest, axis=0)[0]
    return best
