"""MiMo-7B: Qwen2's dense trunk, and an MTP module whose tensors have names of their own."""

from mtpbuild.builder.models.common.copies import tied_head
from mtpbuild.builder.models.common.grouped_config import cache_specs
from mtpbuild.builder.models.family import Family, late
from mtpbuild.builder.models.mimo.config import (
    PREFIX,
    MimoConfig,
    costs,
    parse_config,
    split_sizes,
)

FAMILY = Family(
    name="MiMoForCausalLM",
    architectures=("MiMoForCausalLM",),
    model_type="mimo",
    config=MimoConfig,
    parse_config=parse_config,
    make_model=late(f"{__name__}.model", "Mimo"),
    weight_table=late(f"{__name__}.model", "weight_table"),
    copies=tied_head,
    cache_specs=cache_specs,
    split_sizes=split_sizes,
    costs=costs,
    reference=late(f"{__name__}.reference", "Plain"),
    modules=PREFIX,
)
