"""Sizes that ranks split and values that a feed-forward holds, for any attention."""

from mtpbuild.builder.checkpoint.config import ModelConfig, MoEConfig
from mtpbuild.builder.models.costs import Split
from mtpbuild.runtime.ranks import Ranks

DENSE_EXPERTS = 16  # at most, for a layer that computes all


def computes_all_experts(c: ModelConfig) -> bool:
    """Return whether a layer computes all its experts, chosen or not, as there are few."""
    return c.n_routed_experts <= DENSE_EXPERTS


def list_splits(c: ModelConfig, ranks: Ranks) -> list[Split]:
    """Return the sizes, besides those of attention, that the ranks must divide.

    An error names the first one that does not split.
    """
    parts = ranks.parts
    modules = c.num_nextn_predict_layers
    splits = [Split("vocab_size", c.vocab_size, parts)]
    if isinstance(c, MoEConfig) and c.n_shared_experts:
        inner = c.moe_intermediate_size * c.n_shared_experts
        name = "moe_intermediate_size x n_shared_experts"
        splits.append(Split(name, inner, parts, "shared experts"))
    if isinstance(c, MoEConfig) and c.n_routed_experts:
        size = c.moe_intermediate_size
        splits.append(Split("moe_intermediate_size", size, ranks.tp // ranks.ep, "experts"))
    if not all(map(c.is_moe, range(c.num_hidden_layers + modules))):
        splits.append(Split("intermediate_size", c.intermediate_size, parts, "dense MLPs"))
    if modules:
        splits.append(Split("2 x hidden_size", 2 * c.hidden_size, parts))
    return splits


def count_activations(c: ModelConfig, ranks: Ranks) -> float:
    """Count the values of a token that a feed-forward holds at its peak."""
    dense = 3 * c.intermediate_size / ranks.parts
    if not isinstance(c, MoEConfig):
        return dense
    return max(dense, c.num_experts_per_tok * (2 * c.moe_intermediate_size + c.hidden_size))
