"""DeepSeek-V4: residual streams, and attention to a window and to compressed rows."""

import re

from mtpbuild.builder.graph.style import Attends
from mtpbuild.builder.models.common.copies import list_tied_head
from mtpbuild.builder.models.deepseek_v4 import config
from mtpbuild.builder.models.family import Family, import_lazily

FAMILY = Family(
    name="DeepseekV4ForCausalLM",
    architectures=("DeepseekV4ForCausalLM",),
    model_type="deepseek_v4",
    config=config.DeepseekV4Config,
    make_model=import_lazily(f"{__name__}.model", "DeepseekV4"),
    weight_table=import_lazily(f"{__name__}.weights", "weight_table"),
    copies=list_tied_head,
    cache_widths=config.cache_widths,
    more_rows=config.list_compressed_rows,
    row_step=lambda c: max(c.ratios),
    windows=config.list_windows,
    find_head=config.find_dspark,
    leaves_out=config.is_left_out,
    split_sizes=config.split_sizes,
    costs=config.costs,
    reference=import_lazily(f"{__name__}.reference", "PlainDeepseekV4"),
    attention=Attends.COMPRESSED,
    quantisable=re.compile(
        r"self_attn\.[qko]\w*_proj|self_attn\.compressor\.indexer\.q_b_proj|mlp\..*_proj"
        r"|[eh]_proj"
    ),
    own_kinds={"_hc.": "router, norms", "hc_head": "router, norms", "compressor": "attention"},
)
