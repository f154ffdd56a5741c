"""GLM-4.5, 4.6 and 4.7: grouped-query attention, DeepSeek-V3's experts, one MTP layer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mtpbuild.builder.checkpoint.config import MoEConfig, Reader
from mtpbuild.builder.models.common.grouped_config import GroupedConfig, read_head_sizes
from mtpbuild.builder.models.common.grouped_family import GROUPED
from mtpbuild.builder.models.family import import_lazily

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


FAMILY = replace(
    GROUPED,
    name="Glm4MoeForCausalLM",
    architectures=("Glm4MoeForCausalLM",),
    model_type="glm4_moe",
    config=Glm4MoeConfig,
    parse_config=parse_config,
    gguf=import_lazily(f"{__name__}.gguf", "list_architectures"),
)
