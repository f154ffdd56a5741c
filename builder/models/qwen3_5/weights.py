"""Qwen3.5's table from checkpoint tensors to the program's weights."""

from __future__ import annotations  # Tensor is imported for types alone

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from mtpbuild.builder.checkpoint.config import HEAD
from mtpbuild.builder.lazy_torch import torch
from mtpbuild.builder.models.common.grouped_weights import list_grouped_weights
from mtpbuild.builder.models.common.moe_weights import list_feed_forward_weights
from mtpbuild.builder.models.common.weight import (
    Share,
    StoredTensor,
    Weight,
    make_weight_table,
    mlp,
    product,
)
from mtpbuild.builder.models.qwen3_5.config import Qwen35Config

if TYPE_CHECKING:
    from torch import Tensor

GATED_NORM = ".linear_attn.norm.weight"  # the only norm whose stored weight is the factor itself


def weight_table(c: Qwen35Config, share: Share) -> list[Weight]:
    """Return every weight of main model and MTP module, in the order of use."""

    def attention(index: int, at: str, to: str) -> Iterator[Weight]:
        if index < c.num_hidden_layers and c.delta_layers[index]:
            return list_delta_weights(c, f"{at}.linear_attn", f"{to}.linear_attn")
        return list_grouped_weights(c, index, at, to)

    def is_minus_one(weight: Weight) -> bool:
        """Return whether a stored weight is a factor minus 1: so it is for all norms but one."""
        own = weight.stored[0].name.startswith(f"{HEAD}.") or weight.name.endswith(GATED_NORM)
        return weight.name.endswith("norm.weight") and not own

    return [
        replace(weight, transform=lambda w: 1 + w) if is_minus_one(weight) else weight
        for weight in make_weight_table(c, attention, partial(feed_forward, c, share))
    ]


def feed_forward(c: Qwen35Config, share: Share, index: int, at: str, to: str) -> Iterator[Weight]:
    yield from list_feed_forward_weights(c, share, index, at, to)
    if c.is_moe(index) and (inner := c.shared_expert_intermediate_size):
        yield from mlp(c.hidden_size, inner, f"{at}.shared_expert", f"{to}.shared_experts")
        gate = StoredTensor(f"{at}.shared_expert_gate.weight", (1, c.hidden_size))
        yield Weight(f"{to}.shared_experts.gate", (gate,), lambda w: w.T)


def list_delta_weights(c: Qwen35Config, at: str, to: str) -> Iterator[Weight]:
    """Yield the weights of a gated delta rule."""
    E, H, values = c.hidden_size, c.linear_num_value_heads, c.delta_values
    parts = (c.delta_keys, c.delta_keys, values)
    if c.packed:
        rows, heads = c.channels + values, 2 * H
        both = StoredTensor(f"{at}.in_proj_qkvz.weight", (rows, E), axis=0)
        yield product(f"{to}.in_proj", both, rows=lambda w: by_kind(w, list_packed_sizes(c)))
        decay = StoredTensor(f"{at}.in_proj_ba.weight", (heads, E), axis=0)
        size = H // c.linear_num_key_heads
        yield product(f"{to}.in_proj_ba", decay, rows=lambda w: by_kind(w, (size, size)))
    else:
        qkv = StoredTensor(f"{at}.in_proj_qkv.weight", (c.channels, E), axis=0, sections=parts)
        yield product(
            f"{to}.in_proj", qkv, StoredTensor(f"{at}.in_proj_z.weight", (values, E), axis=0)
        )
        ba = (StoredTensor(f"{at}.in_proj_{name}.weight", (H, E), axis=0) for name in "ba")
        yield product(f"{to}.in_proj_ba", *ba)
    taps = (c.channels, 1, c.linear_conv_kernel_dim)
    conv = StoredTensor(f"{at}.conv1d.weight", taps, axis=0, sections=parts)
    yield Weight(f"{to}.conv", (conv,), lambda w: w[:, 0].T)
    rate = StoredTensor(f"{at}.A_log", (H,), axis=0)
    yield Weight(f"{to}.decay_rate", (rate,), lambda w: w.exp())
    yield Weight(f"{to}.decay_bias", (StoredTensor(f"{at}.dt_bias", (H,), axis=0),))
    norm = StoredTensor(f"{at}.norm.weight", (c.linear_value_head_dim,))
    yield Weight(f"{to}.norm.weight", (norm,))
    yield product(f"{to}.out_proj", StoredTensor(f"{at}.out_proj.weight", (E, values), axis=1))


def list_packed_sizes(c: Qwen35Config) -> tuple[int, ...]:
    """Return the number of rows per key head: of its query, its key, its values, their gates."""
    values = c.delta_values // c.linear_num_key_heads
    return c.linear_key_head_dim, c.linear_key_head_dim, values, values


def by_kind(w: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Reorder rows that are stored head by head, so that rows of one kind are together."""
    heads = w.unflatten(0, (-1, sum(sizes)))
    return torch.cat([part.flatten(0, 1) for part in heads.split(sizes, dim=1)])
