"""Qwen3.5's table from checkpoint tensors to the program's weights."""

from __future__ import annotations  # Tensor is imported for types alone

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from mtpbuild.builder.lazy_torch import torch
from mtpbuild.builder.models.common.grouped_weights import grouped_weights
from mtpbuild.builder.models.common.moe_weights import moe_weights
from mtpbuild.builder.models.common.weight import (
    Share,
    Stored,
    Weight,
    list_layer_weights,
    make_whole_table,
    mlp,
    product,
)
from mtpbuild.builder.models.qwen3_5.config import PREFIX, Qwen35Config

if TYPE_CHECKING:
    from torch import Tensor

NORMS = {  # the program's names -> the checkpoint's
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}
GATED_NORM = ".linear_attn.norm.weight"  # the only norm whose stored weight is the factor itself


def weight_table(c: Qwen35Config, share: Share) -> list[Weight]:
    """Return every weight of main model and MTP module, in the order of use."""

    def layer(at: str, to: str, index: int, delta: bool) -> Iterator[Weight]:
        if delta:
            first = list_delta_weights(c, f"{at}.linear_attn", f"{to}.linear_attn")
        else:
            first = grouped_weights(c, f"{at}.self_attn", f"{to}.self_attn")
        return list_layer_weights(c, at, to, first, feed_forward(c, share, index, at, to))

    def trunk(i: int, to: str) -> Iterator[Weight]:
        return layer(f"model.layers.{i}", to, i, c.delta_layers[i])

    def modules() -> Iterator[Weight]:
        E = c.hidden_size
        for j in range(c.num_nextn_predict_layers):
            to = f"mtp.{j}"
            for ours, theirs in NORMS.items():
                yield Weight(f"{to}.{ours}.weight", (Stored(f"{PREFIX}{theirs}.weight", (E,)),))
            yield product(f"{to}.eh_proj", Stored(f"{PREFIX}fc.weight", (E, 2 * E), axis=1))
            yield from layer(f"{PREFIX}layers.{j}", to, c.num_hidden_layers + j, False)

    table = make_whole_table(c, trunk, modules())
    return [add_one(w) if w.name.endswith("norm.weight") else w for w in table]


def add_one(norm: Weight) -> Weight:
    """Add 1 to a norm's weight, as the checkpoint stores the factor minus 1 except for one norm."""
    if norm.name.endswith(GATED_NORM):
        return norm
    return replace(norm, transform=lambda w: 1 + w)


def feed_forward(c: Qwen35Config, s: Share, index: int, at: str, to: str) -> Iterator[Weight]:
    at, to, E = f"{at}.mlp", f"{to}.mlp", c.hidden_size
    if not c.is_moe(index):
        yield from mlp(E, c.intermediate_size, at, to)
        return
    yield from moe_weights(c, s, at, to)
    if inner := c.shared_expert_intermediate_size:
        yield from mlp(E, inner, f"{at}.shared_expert", f"{to}.shared_experts")
        gate = Stored(f"{at}.shared_expert_gate.weight", (1, E))
        yield Weight(f"{to}.shared_experts.gate", (gate,), lambda w: w.T)


def list_delta_weights(c: Qwen35Config, at: str, to: str) -> Iterator[Weight]:
    """Yield the weights of a gated delta rule."""
    E, H, values = c.hidden_size, c.linear_num_value_heads, c.delta_values
    parts = (c.delta_keys, c.delta_keys, values)
    if c.packed:
        rows, heads = c.channels + values, 2 * H
        both = Stored(f"{at}.in_proj_qkvz.weight", (rows, E), axis=0)
        yield product(f"{to}.in_proj", both, rows=lambda w: by_kind(w, list_packed_sizes(c)))
        decay = Stored(f"{at}.in_proj_ba.weight", (heads, E), axis=0)
        size = H // c.linear_num_key_heads
        yield product(f"{to}.in_proj_ba", decay, rows=lambda w: by_kind(w, (size, size)))
    else:
        qkv = Stored(f"{at}.in_proj_qkv.weight", (c.channels, E), axis=0, sections=parts)
        yield product(f"{to}.in_proj", qkv, Stored(f"{at}.in_proj_z.weight", (values, E), axis=0))
        ba = (Stored(f"{at}.in_proj_{name}.weight", (H, E), axis=0) for name in "ba")
        yield product(f"{to}.in_proj_ba", *ba)
    taps = (c.channels, 1, c.linear_conv_kernel_dim)
    conv = Stored(f"{at}.conv1d.weight", taps, axis=0, sections=parts)
    yield Weight(f"{to}.conv", (conv,), lambda w: w[:, 0].T)
    rate = Stored(f"{at}.A_log", (H,), axis=0)
    yield Weight(f"{to}.decay_rate", (rate,), lambda w: w.exp())
    yield Weight(f"{to}.decay_bias", (Stored(f"{at}.dt_bias", (H,), axis=0),))
    norm = Stored(f"{at}.norm.weight", (c.linear_value_head_dim,))
    yield Weight(f"{to}.norm.weight", (norm,))
    yield product(f"{to}.out_proj", Stored(f"{at}.out_proj.weight", (E, values), axis=1))


def list_packed_sizes(c: Qwen35Config) -> tuple[int, ...]:
    """Return the number of rows per key head: of its query, its key, its values, their gates."""
    values = c.delta_values // c.linear_num_key_heads
    return c.linear_key_head_dim, c.linear_key_head_dim, values, values


def by_kind(w: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Reorder rows that are stored head by head, so that rows of one kind are together."""
    heads = w.unflatten(0, (-1, sum(sizes)))
    return torch.cat([part.flatten(0, 1) for part in heads.split(sizes, dim=1)])
