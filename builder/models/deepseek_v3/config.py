"""DeepSeek-V3's `config.json`, also in the spelling of transformers 5, and its sizes and costs."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from mtpbuild.builder.checkpoint.config import MoEConfig, Reader, fixed, flag, integer
from mtpbuild.builder.models.common.moe_config import count_activations, list_splits
from mtpbuild.builder.models.costs import Costs, Split
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(MoEConfig):
    """The shape of a DeepSeek-V3-class model: latent attention (MLA), routed experts."""

    usual: ClassVar[dict[str, Any]] = {
        "q_lora_rank": 1536, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
        "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
    }  # fmt: skip
    supported: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu", "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "attention_bias": False,
    }  # fmt: skip

    num_attention_heads: int = integer()
    # null is a value: queries have no latent.
    q_lora_rank: int | None = field(metadata={"read": lambda read, key: read_q_lora_rank(read)})
    kv_lora_rank: int = integer()
    qk_nope_head_dim: int = integer()
    qk_rope_head_dim: int = integer(2)
    v_head_dim: int = integer()
    rope_interleave: bool = flag(True)
    # The eps of the latents' norms. transformers takes its norm's default and ignores rms_norm_eps;
    # vLLM and SGLang take rms_norm_eps, which is 1e-5 for Moonlight and GLM-4.7-Flash. The question
    # is open (transformers PRs #44317, #44346, vLLM PR #35515). We follow transformers, our oracle.
    latent_norm_eps: float = fixed(1e-6)

    def check(self) -> None:
        super().check()
        if self.qk_rope_head_dim % 2:
            raise CheckpointError(f"qk_rope_head_dim {self.qk_rope_head_dim} must be even")

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_dim(self) -> int:
        """C, the values per cached token and layer: the latent and the rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def read_q_lora_rank(read: Reader) -> int | None:
    key = "q_lora_rank"
    return None if read.raw.get(key, 0) is None else read.integer(key, 1)


def cache_widths(c: DeepseekV3Config, ranks: Ranks) -> list[int]:
    """Return the width of each layer's cache rows; each rank has all latents."""
    return [c.cache_dim] * (c.num_hidden_layers + c.num_nextn_predict_layers)


def cache_sections(c: DeepseekV3Config, layer: int) -> tuple[int, ...]:
    """Return the sizes of a cache row's parts: the latent, and the rotary key."""
    return c.kv_lora_rank, c.qk_rope_head_dim


def split_sizes(c: DeepseekV3Config, ranks: Ranks) -> list[Split]:
    """Return the sizes that the ranks must divide; an error names the first that fails."""
    heads, parts = c.num_attention_heads, ranks.parts
    values = Split("num_attention_heads x v_head_dim", heads * c.v_head_dim, parts, "attention")
    return [Split("num_attention_heads", heads, parts), values, *list_splits(c, ranks)]


def costs(c: DeepseekV3Config, ranks: Ranks) -> Costs:
    """Return a step's costs: in the absorbed form heads score whole rows and sum their latents.

    In a prompt each head holds scores, their softmax and expanded values.
    """
    heads = c.num_attention_heads / ranks.parts
    attention = heads * (2 * c.cache_dim + c.qk_head_dim + c.v_head_dim)
    return Costs(
        row_operations=2.0 * heads * (c.cache_dim + c.kv_lora_rank),
        activations=max(attention, count_activations(c, ranks)) + 4 * c.hidden_size,
        experts=c.n_routed_experts,
        chosen=c.num_experts_per_tok,
        scores=2.0 * heads,
        expanded=heads * c.v_head_dim,
    )
