"""GLM-4.7-Flash: DeepSeek-V3's attention and experts in other sizes, one MTP layer.

In transformers' class only layer 0 is dense unless `mlp_layer_types` is given, so the default of
`first_k_dense_replace` is 1 here.
"""

from dataclasses import dataclass, replace

from mtpbuild.builder.models.deepseek_v3 import FAMILY as DEEPSEEK_V3
from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config
from mtpbuild.builder.models.family import import_lazily


@dataclass(frozen=True, kw_only=True)
class Glm4MoeLiteConfig(DeepseekV3Config):
    """DeepSeek-V3's values with other defaults."""

    usual = DeepseekV3Config.usual | {
        "q_lora_rank": 768, "moe_intermediate_size": 1536, "n_routed_experts": 64,
        "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1, "rms_norm_eps": 1e-5,
    }  # fmt: skip


FAMILY = replace(
    DEEPSEEK_V3,
    name="Glm4MoeLiteForCausalLM",
    architectures=("Glm4MoeLiteForCausalLM",),
    model_type="glm4_moe_lite",
    config=Glm4MoeLiteConfig,
    gguf=import_lazily(f"{__name__}.gguf", "list_architectures"),
)
