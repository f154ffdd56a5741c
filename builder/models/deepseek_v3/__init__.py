"""DeepSeek-V3 and R1: multi-head latent attention, routed experts, MTP modules."""

import re

from mtpbuild.builder.graph.style import Attends
from mtpbuild.builder.models.common.copies import list_copies_in_layers
from mtpbuild.builder.models.deepseek_v3 import config
from mtpbuild.builder.models.family import Family, import_lazily

FAMILY = Family(
    name="DeepseekV3ForCausalLM",
    architectures=("DeepseekV3ForCausalLM", "DeepseekV3ForCausalLMNextN"),
    model_type="deepseek_v3",
    config=config.DeepseekV3Config,
    make_model=import_lazily(f"{__name__}.model", "DeepseekV3"),
    weight_table=import_lazily(f"{__name__}.weights", "weight_table"),
    copies=list_copies_in_layers,
    cache_widths=config.cache_widths,
    cache_sections=config.cache_sections,
    split_sizes=config.split_sizes,
    costs=config.costs,
    reference=import_lazily(f"{__name__}.reference", "PlainDeepseek"),
    attention=Attends.LATENT,
    quantisable=re.compile(r"(self_attn|mlp)\..*_proj(_with_mqa)?"),
    gguf=import_lazily(f"{__name__}.gguf", "list_architectures"),
)
