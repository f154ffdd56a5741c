"""MiMo-7B: Qwen2's dense trunk, and an MTP module whose tensors have names of their own."""

from mtpbuild.builder.models.common.copies import tied_head
from mtpbuild.builder.models.common.grouped_config import cache_specs
from mtpbuild.builder.models.family import Family, late
from mtpbuild.builder.models.mimo import config

FAMILY = Family(
    name="MiMoForCausalLM",
    architectures=("MiMoForCausalLM",),
    model_type="mimo",
    config=config.MimoConfig,
    parse_config=config.parse_config,
    make_model=late(f"{__name__}.model", "Mimo"),
    weight_table=late(f"{__name__}.weights", "weight_table"),
    copies=tied_head,
    cache_specs=cache_specs,
    split_sizes=config.split_sizes,
    costs=config.costs,
    reference=late(f"{__name__}.reference", "Plain"),
    modules=config.PREFIX,
)
