"""Sizes and costs of all models with routed experts, for any attention."""

from mtpbuild.builder.checkpoint.config import ModelConfig, MoEConfig
from mtpbuild.builder.models.costs import Split
from mtpbuild.runtime.ranks import Ranks

DENSE_EXPERTS = 16  # with at most this many all experts are computed, chosen or not


def list_expert_splits(c: MoEConfig, ranks: Ranks) -> list[Split]:
    """Return the sizes, besides those of attention, that the ranks must divide.

    An error names the first one that does not split.
    """
    parts, layers = ranks.parts, range(c.num_hidden_layers + c.num_nextn_predict_layers)
    inner, splits = c.moe_intermediate_size, [Split("vocab_size", c.vocab_size, parts)]
    if c.n_shared_experts:
        name = "moe_intermediate_size x n_shared_experts"
        splits.append(Split(name, inner * c.n_shared_experts, parts, "shared experts"))
    if c.n_routed_experts:
        splits.append(Split("moe_intermediate_size", inner, ranks.tp // ranks.ep, "experts"))
    if not all(c.is_moe(layer) for layer in layers):
        splits.append(Split("intermediate_size", c.intermediate_size, parts, "dense MLPs"))
    return [*splits, *list_module_splits(c, ranks)]


def list_module_splits(c: ModelConfig, ranks: Ranks) -> list[Split]:
    """Return the sizes of an MTP module that ranks must divide; none without modules."""
    modules = c.num_nextn_predict_layers
    return [Split("2 x hidden_size", 2 * c.hidden_size, ranks.parts)] if modules else []


def count_expert_activations(c: MoEConfig, ranks: Ranks) -> float:
    """Count the values of a token that a feed-forward holds at its peak."""
    experts = c.num_experts_per_tok * (2 * c.moe_intermediate_size + c.hidden_size)
    return max(experts, 3 * c.intermediate_size / ranks.parts)
