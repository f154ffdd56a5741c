"""DeepSeek-V3's memory and arithmetic, and the sizes that ranks split; this needs no torch."""

from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config
from mtpbuild.builder.models.family import Costs, Split
from mtpbuild.runtime.ranks import Ranks


def cache_specs(c: DeepseekV3Config, ranks: Ranks) -> list[int]:
    """Latents have no heads that could be split: every rank holds all of them."""
    return [c.cache_dim] * (c.num_hidden_layers + c.num_nextn_predict_layers)


def split_sizes(c: DeepseekV3Config, ranks: Ranks) -> list[Split]:
    """Sizes that must divide; the first that does not is the one told."""
    parts, layers = ranks.parts, range(c.num_hidden_layers + c.num_nextn_predict_layers)
    heads, inner, shared = c.num_attention_heads, c.moe_intermediate_size, c.n_shared_experts
    found = [Split("num_attention_heads", heads, parts), Split("vocab_size", c.vocab_size, parts)]
    if shared:
        name = "moe_intermediate_size x n_shared_experts"
        found.append(Split(name, inner * shared, parts, "shared experts"))
    if c.n_routed_experts:
        found.append(Split("moe_intermediate_size", inner, ranks.tp // ranks.ep, "experts"))
    rows = heads * c.v_head_dim
    found.append(Split("num_attention_heads x v_head_dim", rows, parts, "attention"))
    if not all(c.is_moe(layer) for layer in layers):
        found.append(Split("intermediate_size", c.intermediate_size, parts, "dense MLPs"))
    if c.num_nextn_predict_layers:
        found.append(Split("2 x hidden_size", 2 * c.hidden_size, parts))
    return found


def costs(c: DeepseekV3Config, ranks: Ranks) -> Costs:
    """Attention is absorbed: scores over a whole row, values over its latent, for every head."""
    heads = c.num_attention_heads / ranks.parts
    attention = heads * (2 * c.cache_dim + c.qk_head_dim + c.v_head_dim)
    experts = c.num_experts_per_tok * (2 * c.moe_intermediate_size + c.hidden_size)
    dense = 3 * c.intermediate_size / ranks.parts
    return Costs(
        row_operations=2.0 * heads * (c.cache_dim + c.kv_lora_rank),
        activations=max(attention, experts, dense) + 4 * c.hidden_size,
        experts=c.n_routed_experts,
        chosen=c.num_experts_per_tok,
    )
