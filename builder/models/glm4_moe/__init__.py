"""GLM-4.5, 4.6 and 4.7: grouped-query attention, DeepSeek-V3's experts, one MTP layer."""

from mtpbuild.builder.models.common.copies import list_copies_in_layers
from mtpbuild.builder.models.common.grouped_config import cache_sections, cache_widths
from mtpbuild.builder.models.family import Family, import_lazily
from mtpbuild.builder.models.glm4_moe import config

FAMILY = Family(
    name="Glm4MoeForCausalLM",
    architectures=("Glm4MoeForCausalLM",),
    model_type="glm4_moe",
    config=config.Glm4MoeConfig,
    parse_config=config.parse_config,
    make_model=import_lazily(f"{__name__}.model", "Glm4Moe"),
    weight_table=import_lazily(f"{__name__}.weights", "weight_table"),
    copies=list_copies_in_layers,
    cache_widths=cache_widths,
    cache_sections=cache_sections,
    split_sizes=config.split_sizes,
    costs=config.costs,
    reference=import_lazily(f"{__name__}.reference", "PlainGlm4Moe"),
    gguf=import_lazily(f"{__name__}.gguf", "list_architectures"),
)
