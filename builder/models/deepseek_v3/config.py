"""DeepSeek-V3's `config.json`, also in the spelling of transformers 5."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtpbuild.builder.models.config import MoEConfig, Reader, flag, integer
from mtpbuild.runtime.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(MoEConfig):
    """Shape of a DeepSeek-V3-class model: multi-head latent attention, routed experts."""

    num_attention_heads: int = integer()
    q_lora_rank: int | None
    kv_lora_rank: int = integer()
    qk_nope_head_dim: int = integer()
    qk_rope_head_dim: int = integer(2)
    v_head_dim: int = integer()
    rope_interleave: bool = flag(True)

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_dim(self) -> int:
        """Values per cached token and layer: the latent and the rotary key (C in DESIGN 3)."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def parse_config(raw: Mapping[str, Any]) -> DeepseekV3Config:
    """Normalise a `config.json`; raises CheckpointError."""
    read = Reader(raw)
    read.only(hidden_act="silu", scoring_func="sigmoid", topk_method="noaux_tc")
    if raw.get("attention_bias"):
        raise CheckpointError("attention_bias true is not supported; DeepSeek-V3 has no biases")
    q_lora = None if raw.get("q_lora_rank") is None else read.integer("q_lora_rank", 1)
    config = read.fill(DeepseekV3Config, q_lora_rank=q_lora)
    config.check_experts()
    if config.qk_rope_head_dim % 2:
        raise CheckpointError(f"qk_rope_head_dim {config.qk_rope_head_dim} must be even")
    return config
