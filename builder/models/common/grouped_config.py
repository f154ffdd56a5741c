"""Grouped-query attention in numbers: configuration, cache rows, sizes that ranks split, costs.

Several query heads share a head of keys and values. A cache row holds the keys of all these heads,
then their values.
"""

from dataclasses import dataclass, field

from mtpbuild.builder.checkpoint.config import (
    HEAD,
    KeyRows,
    ModelConfig,
    MoEConfig,
    Reader,
    fixed,
    flag,
    integer,
)
from mtpbuild.builder.models.common.moe_config import count_activations, list_splits
from mtpbuild.builder.models.costs import Costs, Split
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class GroupedConfig(ModelConfig):
    """The configuration of a model with grouped-query attention."""

    num_attention_heads: int = integer()
    num_key_value_heads: int = integer()
    head_dim: int = field(metadata={"read": lambda read, key: read_head_dim(read)})
    # The first values of head_dim are rotated; pairs are (i, i + rotary_dim / 2).
    rotary_dim: int = field(metadata={"read": lambda read, key: read_rotary_dim(read)})
    attention_bias: bool = flag(True)  # of queries, keys and values
    use_qk_norm: bool = flag(False)  # queries and keys are normalised per head, after the bias
    output_gate: bool = fixed(False)  # q_proj has a gate beside each head's query

    def find_key_rows(self, at: str) -> KeyRows | None:
        if at.startswith(f"{HEAD}."):
            return None  # a head of another repository, whose sizes are its own
        queries = self.num_attention_heads // self.num_key_value_heads
        return KeyRows(
            at,
            self.head_dim,
            self.rotary_dim,
            queries,
            has_norm=self.use_qk_norm,
            has_bias=self.attention_bias,
        )

    def check(self) -> None:
        super().check()
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        if heads % shared:
            raise CheckpointError(
                f"num_attention_heads {heads} must be a multiple of num_key_value_heads {shared}"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise CheckpointError(
                f"partial_rotary_factor rotates {self.rotary_dim} of head_dim {self.head_dim} "
                "values: it must rotate an even number, from 2 to head_dim"
            )


def read_head_dim(read: Reader) -> int:
    usual = read.integer("hidden_size", 1) // read.integer("num_attention_heads", 1)
    return read.integer("head_dim", 1, usual)


def read_rotary_dim(read: Reader) -> int:
    rope = read.rope()
    nested = rope if rope.raw.get("partial_rotary_factor") is not None else read
    return int(read_head_dim(read) * nested.number("partial_rotary_factor", 1.0, above=0))


def cache_widths(c: GroupedConfig, ranks: Ranks) -> list[int]:
    """Return the width of each layer's cache rows: keys and values of one rank's heads."""
    width = 2 * c.num_key_value_heads * c.head_dim // ranks.parts
    return [width] * (c.num_hidden_layers + c.num_nextn_predict_layers)


def cache_sections(c: GroupedConfig, layer: int) -> tuple[int, ...]:
    """Return the size of a cache row's parts, the keys and the values of a head."""
    return (c.head_dim,)


def split_sizes(c: GroupedConfig, ranks: Ranks) -> list[Split]:
    """Return the sizes that the ranks must divide; each rank has whole heads."""
    heads = c.num_attention_heads * c.head_dim
    return [
        Split("num_key_value_heads", c.num_key_value_heads, ranks.parts),
        Split("num_attention_heads x head_dim", heads, ranks.parts, "attention"),
        *list_splits(c, ranks),
    ]


def costs(c: GroupedConfig, ranks: Ranks) -> Costs:
    """Return a step's costs: per token and cached row, each head computes a score and a value."""
    heads, D = c.num_attention_heads, c.head_dim
    attention = (2 * heads + 2 * c.num_key_value_heads) * D / ranks.parts
    return Costs(
        row_operations=4.0 * heads * D / ranks.parts,
        activations=max(attention, count_activations(c, ranks)) + 4 * c.hidden_size,
        experts=c.n_routed_experts,
        chosen=c.num_experts_per_tok if isinstance(c, MoEConfig) else 0,
    )
