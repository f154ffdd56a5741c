"""GLM-4.5's `config.json`, and the costs of its sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtpbuild.builder.checkpoint.config import MoEConfig, Reader
from mtpbuild.builder.models.common.grouped_config import (
    GroupedConfig,
    count_grouped_costs,
    list_attention_splits,
    read_head_sizes,
)
from mtpbuild.builder.models.common.moe_config import count_expert_activations, list_expert_splits
from mtpbuild.builder.models.costs import Costs, Split
from mtpbuild.runtime.ranks import Ranks

# What transformers' class takes for a value that config.json leaves out.
USUAL: dict[str, Any] = {
    "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 1, "attention_bias": False,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(MoEConfig, GroupedConfig):
    """GLM-4.5's values."""


def parse_config(raw: Mapping[str, Any]) -> Glm4MoeConfig:
    """Normalise a `config.json`; raise CheckpointError."""
    read = Reader(raw, USUAL)
    read.only(hidden_act="silu", scoring_func="sigmoid", topk_method="noaux_tc")
    config = read.fill(Glm4MoeConfig, **read_head_sizes(read))
    config.check_experts()
    config.check_heads()
    return config


def split_sizes(c: Glm4MoeConfig, ranks: Ranks) -> list[Split]:
    return [*list_attention_splits(c, ranks), *list_expert_splits(c, ranks)]


def costs(c: Glm4MoeConfig, ranks: Ranks) -> Costs:
    counts = {"experts": c.n_routed_experts, "chosen": c.num_experts_per_tok}
    return count_grouped_costs(c, ranks, count_expert_activations(c, ranks), **counts)
