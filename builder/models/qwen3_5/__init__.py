"""Qwen3.5, its mixtures of experts, and Qwen3-Next: most layers are a gated delta rule."""

import re
from dataclasses import replace

from mtpbuild.builder.models.common.copies import list_tied_head
from mtpbuild.builder.models.common.grouped_family import GROUPED
from mtpbuild.builder.models.family import import_lazily
from mtpbuild.builder.models.qwen3_5 import config

FAMILY = replace(
    GROUPED,
    name="Qwen3_5ForCausalLM",
    architectures=(
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3NextForCausalLM",
    ),
    model_type="qwen3_5",
    config=config.Qwen35Config,
    make_model=import_lazily(f"{__name__}.model", "Qwen35"),
    weight_table=import_lazily(f"{__name__}.weights", "weight_table"),
    copies=list_tied_head,
    cache_widths=config.cache_widths,
    recurrent=config.recurrent,
    split_sizes=config.split_sizes,
    costs=config.costs,
    reference=import_lazily(f"{__name__}.reference", "PlainQwen35"),
    # Not the small projections of a delta rule, whose results are exponents.
    quantisable=re.compile(r"(self_attn|mlp)\..*_proj|linear_attn\.(in_proj_(qkvz?|z)|out_proj)"),
    own_kinds={"linear_attn": "delta rules"},
    gguf=import_lazily(f"{__name__}.gguf", "list_architectures"),
)
