"""The weights of grouped-query attention."""

from __future__ import annotations  # Tensor is imported for types alone

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from mtpbuild.builder.lazy_torch import torch
from mtpbuild.builder.models.common.grouped_config import GroupedConfig
from mtpbuild.builder.models.common.moe_weights import list_feed_forward_weights
from mtpbuild.builder.models.common.weight import (
    Share,
    StoredTensor,
    Weight,
    make_weight_table,
    product,
    stack_rows,
    vector,
)

if TYPE_CHECKING:
    from torch import Tensor


def weight_table(c: GroupedConfig, share: Share) -> list[Weight]:
    """Return the table of a model whose layers are all grouped-query attention."""
    attention = partial(list_grouped_weights, c)
    return make_weight_table(c, attention, partial(list_feed_forward_weights, c, share))


def list_grouped_weights(
    c: GroupedConfig, index: int, at: str, to: str, inputs: int | None = None
) -> Iterator[Weight]:
    """Yield the weights of a layer's attention, by the names that Llama-like checkpoints use.

    inputs: the inputs of queries, keys and values, if they are not the hidden size.
    """
    at, to = f"{at}.self_attn", f"{to}.self_attn"
    E, D, queries = c.hidden_size, c.head_dim, c.num_attention_heads * (2 if c.output_gate else 1)
    counts = {"q": queries, "k": c.num_key_value_heads, "v": c.num_key_value_heads}

    def join_gates_first(q: Tensor, *others: Tensor) -> Tensor:
        """Join projections, with the gates first, which are stored beside each head's query."""
        queries, gates = q.unflatten(0, (-1, 2, D)).unbind(1)
        return torch.cat([gates.flatten(0, 1), queries.flatten(0, 1), *others])

    sizes = {f"{at}.{name}_proj": count * D for name, count in counts.items()}
    weights = (
        StoredTensor(f"{name}.weight", (size, inputs or E), axis=0) for name, size in sizes.items()
    )
    yield product(
        f"{to}.qkv_proj", *weights, rows=join_gates_first if c.output_gate else stack_rows
    )
    if c.attention_bias:
        biases = tuple(
            StoredTensor(f"{name}.bias", (size,), axis=0) for name, size in sizes.items()
        )
        yield Weight(f"{to}.qkv_bias", biases, stack_rows)
    if c.use_qk_norm:
        yield vector(to, at, "q_norm.weight", D)
        yield vector(to, at, "k_norm.weight", D)
    rows = c.num_attention_heads * D
    yield product(f"{to}.o_proj", StoredTensor(f"{at}.o_proj.weight", (E, rows), axis=1))
