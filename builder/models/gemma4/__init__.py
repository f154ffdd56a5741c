"""Gemma-4: layers with a sliding window and layers that see all rows; its head is an assistant.

The trunk is dense, a mixture (experts beside a dense MLP), or small: its last layers read the rows
of earlier ones, and each layer has an input of its own from a second embedding.
"""

import re

from mtpbuild.builder.models.common.copies import list_tied_head
from mtpbuild.builder.models.family import Family, import_lazily
from mtpbuild.builder.models.gemma4 import config

FAMILY = Family(
    name="Gemma4ForCausalLM",
    architectures=(
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForCausalLM",
        "Gemma4UnifiedForConditionalGeneration",
    ),
    model_type="gemma4_text",
    config=config.Gemma4Config,
    make_model=import_lazily(f"{__name__}.model", "Gemma4"),
    weight_table=import_lazily(f"{__name__}.weights", "weight_table"),
    copies=list_tied_head,
    cache_widths=config.cache_widths,
    cache_sections=config.cache_sections,
    gguf=import_lazily(f"{__name__}.gguf", "list_architectures"),
    windows=config.list_windows,
    split_sizes=config.split_sizes,
    costs=config.costs,
    reference=import_lazily(f"{__name__}.reference", "PlainGemma4"),
    quantisable=re.compile(r"(self_attn|mlp|experts)\..*_proj|per_layer_(input_gate|projection)"),
    own_kinds={
        "router": "router, norms",
        "layer_scalar": "router, norms",
        "per_layer": "dense MLPs",
        "experts.": "experts",
    },
    tables=(config.LAYER_TABLE,),
    leaves_out=config.is_left_out,
)
