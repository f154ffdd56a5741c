"""The weights of grouped-query attention."""

from __future__ import annotations  # Tensor is imported for types alone

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mtpbuild.builder.lazy_torch import torch
from mtpbuild.builder.models.common.grouped_config import GroupedConfig
from mtpbuild.builder.models.common.weight import Stored, Weight, product, stack_rows, vector

if TYPE_CHECKING:
    from torch import Tensor


def grouped_weights(c: GroupedConfig, at: str, to: str) -> Iterator[Weight]:
    """Yield the weights of one attention, from the names that Llama-like checkpoints use."""
    E, D, queries = c.hidden_size, c.head_dim, c.num_attention_heads * (2 if c.output_gate else 1)
    counts = {"q": queries, "k": c.num_key_value_heads, "v": c.num_key_value_heads}

    def join_gates_first(q: Tensor, *others: Tensor) -> Tensor:
        """Join projections, with the gates first, which are stored beside each head's query."""
        queries, gates = q.unflatten(0, (-1, 2, D)).unbind(1)
        return torch.cat([gates.flatten(0, 1), queries.flatten(0, 1), *others])

    sizes = {f"{at}.{name}_proj": count * D for name, count in counts.items()}
    weights = (Stored(f"{name}.weight", (size, E), axis=0) for name, size in sizes.items())
    yield product(
        f"{to}.qkv_proj", *weights, rows=join_gates_first if c.output_gate else stack_rows
    )
    if c.attention_bias:
        biases = tuple(Stored(f"{name}.bias", (size,), axis=0) for name, size in sizes.items())
        yield Weight(f"{to}.qkv_bias", biases, stack_rows)
    if c.use_qk_norm:
        yield vector(to, at, "q_norm.weight", D)
        yield vector(to, at, "k_norm.weight", D)
    rows = c.num_attention_heads * D
    yield product(f"{to}.o_proj", Stored(f"{at}.o_proj.weight", (E, rows), axis=1))
