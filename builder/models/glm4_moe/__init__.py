"""GLM-4.5, 4.6 and 4.7: grouped-query attention, DeepSeek-V3's experts, one MTP layer."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mtpbuild.builder.checkpoint.config import MoEConfig
from mtpbuild.builder.models.common.grouped_config import GroupedConfig
from mtpbuild.builder.models.common.grouped_family import GROUPED
from mtpbuild.builder.models.family import import_lazily


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(MoEConfig, GroupedConfig):
    """GLM-4.5's values."""

    usual: ClassVar[dict[str, Any]] = {
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 1, "attention_bias": False,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
    }  # fmt: skip

    supported: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu", "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    }  # fmt: skip


FAMILY = replace(
    GROUPED,
    name="Glm4MoeForCausalLM",
    architectures=("Glm4MoeForCausalLM",),
    model_type="glm4_moe",
    config=Glm4MoeConfig,
    gguf=import_lazily(f"{__name__}.gguf", "list_architectures"),
)
