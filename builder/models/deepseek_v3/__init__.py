"""DeepSeek-V3 and R1: multi-head latent attention, routed experts, MTP modules."""

from mtpbuild.builder.models.deepseek_v3.config import (
    DeepseekV3Config,
    cache_specs,
    costs,
    parse_config,
    split_sizes,
)
from mtpbuild.builder.models.family import Family, late


def duplicates(c: DeepseekV3Config) -> dict[str, str]:
    """Checkpoint names of MTP layers that repeat the embedding or the head -> the original."""
    embedding = "model.embed_tokens.weight"
    head = embedding if c.tie_word_embeddings else "lm_head.weight"
    names = {"lm_head.weight": head} if c.tie_word_embeddings else {}
    for j in range(c.num_nextn_predict_layers):
        layer = f"model.layers.{c.num_hidden_layers + j}"
        names[f"{layer}.embed_tokens.weight"] = embedding
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
    make_model=late(f"{__name__}.model", "DeepseekV3"),
    weight_table=late(f"{__name__}.weights", "weight_table"),
    duplicates=duplicates,
    cache_specs=cache_specs,
    split_sizes=split_sizes,
    costs=costs,
    reference=late(f"{__name__}.reference", "Transformer"),
)
