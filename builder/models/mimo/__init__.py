"""MiMo-7B: Qwen2's dense trunk, and an MTP module whose tensors have names of their own."""

from mtpbuild.builder.models.common.copies import list_tied_head
from mtpbuild.builder.models.common.grouped_config import cache_sections, cache_widths
from mtpbuild.builder.models.family import Family, import_lazily
from mtpbuild.builder.models.mimo import config

FAMILY = Family(
    name="MiMoForCausalLM",
    architectures=("MiMoForCausalLM",),
    model_type="mimo",
    config=config.MimoConfig,
    parse_config=config.parse_config,
    make_model=import_lazily(f"{__name__}.model", "Mimo"),
    weight_table=import_lazily(f"{__name__}.weights", "weight_table"),
    copies=list_tied_head,
    cache_widths=cache_widths,
    cache_sections=cache_sections,
    split_sizes=config.split_sizes,
    costs=config.costs,
    reference=import_lazily(f"{__name__}.reference", "PlainMimo"),
    modules=config.PREFIX,
    join="input_proj",
)
