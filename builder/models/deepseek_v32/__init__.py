"""DeepSeek-V3.2: V3 whose attention reads the rows that an indexer chooses (DSA)."""

import re
from dataclasses import replace

from mtpbuild.builder.graph.style import Attends
from mtpbuild.builder.models.deepseek_v3 import FAMILY as DEEPSEEK_V3
from mtpbuild.builder.models.deepseek_v32 import config
from mtpbuild.builder.models.family import import_lazily

FAMILY = replace(
    DEEPSEEK_V3,
    name="DeepseekV32ForCausalLM",
    architectures=("DeepseekV32ForCausalLM",),
    model_type="deepseek_v32",
    config=config.DeepseekV32Config,
    make_model=import_lazily(f"{__name__}.model", "make_sparse_model"),
    weight_table=import_lazily(f"{__name__}.weights", "weight_table"),
    cache_widths=config.cache_widths,
    cache_sections=lambda c, layer: (),  # an indexer reads its keys in floats
    costs=config.costs,
    reference=import_lazily(f"{__name__}.reference", "PlainDeepseekV32"),
    attention=Attends.CHOSEN,
    runs_by_layer=lambda c: all(c.indexers),
    # Of the indexer all products but `weights_proj`, which weighs its heads.
    quantisable=re.compile(
        r"(self_attn|mlp)\.(?!indexer).*_proj(_with_mqa)?|self_attn\.indexer\.(wq_b|wk)"
    ),
    gguf=import_lazily(f"{__name__}.gguf", "list_architectures"),
)
