"""GLM-5: DeepSeek-V3.2's sparse attention in other sizes; its indexer rotates neighbouring values.

From 5.2 on some layers have no indexer, and reuse the choice of an earlier layer.
"""

from dataclasses import dataclass, replace

from mtpbuild.builder.checkpoint.config import flag
from mtpbuild.builder.models.deepseek_v32 import FAMILY as DEEPSEEK_V32
from mtpbuild.builder.models.deepseek_v32.config import DeepseekV32Config
from mtpbuild.builder.models.family import import_lazily


@dataclass(frozen=True, kw_only=True)
class GlmMoeDsaConfig(DeepseekV32Config):
    """DeepSeek-V3.2's values with other defaults."""

    usual = DeepseekV32Config.usual | {
        "q_lora_rank": 2048, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5,
    }  # fmt: skip

    indexer_rope_interleave: bool = flag(True)


FAMILY = replace(
    DEEPSEEK_V32,
    name="GlmMoeDsaForCausalLM",
    architectures=("GlmMoeDsaForCausalLM",),
    model_type="glm_moe_dsa",
    config=GlmMoeDsaConfig,
    gguf=import_lazily(f"{__name__}.gguf", "list_architectures"),
)
