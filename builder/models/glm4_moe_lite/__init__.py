"""GLM-4.7-Flash: DeepSeek-V3's attention and experts in other sizes, one MTP layer.

transformers' class takes layer 0 alone for dense unless `mlp_layer_types` says otherwise, so
`first_k_dense_replace` is 1 here where it is not given (spec/families.md section 4).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mtpbuild.builder.models.deepseek_v3 import FAMILY as DEEPSEEK_V3
from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config, parse_fields


@dataclass(frozen=True, kw_only=True)
class Glm4MoeLiteConfig(DeepseekV3Config):
    """DeepSeek-V3's values, whose defaults differ."""


def parse_config(raw: Mapping[str, Any]) -> Glm4MoeLiteConfig:
    """Normalise a `config.json`; raises CheckpointError."""
    return parse_fields(Glm4MoeLiteConfig, {"first_k_dense_replace": 1} | dict(raw))


FAMILY = replace(
    DEEPSEEK_V3,
    name="Glm4MoeLiteForCausalLM",
    architectures=("Glm4MoeLiteForCausalLM",),
    model_type="glm4_moe_lite",
    config=Glm4MoeLiteConfig,
    parse_config=parse_config,
)
