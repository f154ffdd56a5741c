"""DeepSeek-V3 and R1: multi-head latent attention, routed experts, MTP modules."""

from typing import TYPE_CHECKING

from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config, parse_config
from mtpbuild.builder.models.deepseek_v3.costs import cache_specs, costs, split_sizes
from mtpbuild.builder.models.family import Family
from mtpbuild.runtime.ranks import Ranks

if TYPE_CHECKING:
    from mtpbuild.builder.models.common.share import Share
    from mtpbuild.builder.models.common.weights import Weight
    from mtpbuild.builder.models.deepseek_v3.model import DeepseekV3
    from mtpbuild.builder.models.deepseek_v3.reference import Transformer


def _model(config: DeepseekV3Config, ranks: Ranks) -> "DeepseekV3":
    from mtpbuild.builder.models.deepseek_v3.model import DeepseekV3

    return DeepseekV3(config, ranks)


def _weights(config: DeepseekV3Config, share: "Share") -> "list[Weight]":
    from mtpbuild.builder.models.deepseek_v3.weights import weight_table

    return weight_table(config, share)


def _reference(config: DeepseekV3Config) -> "Transformer":
    from mtpbuild.builder.models.deepseek_v3.reference import Transformer

    return Transformer(config)


def duplicates(c: DeepseekV3Config) -> dict[str, str]:
    """Checkpoint names of MTP layers that repeat the embedding or the head -> the original."""
    head = "model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"
    names = {"lm_head.weight": head} if c.tie_word_embeddings else {}
    for j in range(c.num_nextn_predict_layers):
        layer = f"model.layers.{c.num_hidden_layers + j}"
        names[f"{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        names[f"{layer}.shared_head.head.weight"] = head
    return names


FAMILY = Family(
    name="DeepseekV3ForCausalLM",
    architectures=("DeepseekV3ForCausalLM", "DeepseekV3ForCausalLMNextN"),
    model_type="deepseek_v3",
    config=DeepseekV3Config,
    # Products with the hidden state, but for eh_proj and the router.
    quantisable=r"model\.layers\.(\d+)\.(self_attn|mlp)\..*_proj(_with_mqa)?\.weight",
    parse_config=parse_config,
    make_model=_model,
    weight_table=_weights,
    duplicates=duplicates,
    cache_specs=cache_specs,
    split_sizes=split_sizes,
    costs=costs,
    reference=_reference,
)
