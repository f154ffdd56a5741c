"""DeepSeek-V3.2 with its MTP modules: DeepSeek-V3 whose attention reads chosen rows."""

from mtpbuild.builder.models.common.causal_lm import Block, UniformLM
from mtpbuild.builder.models.common.moe import feed_forward
from mtpbuild.builder.models.deepseek_v32.attention import SparseAttention
from mtpbuild.builder.models.deepseek_v32.config import DeepseekV32Config
from mtpbuild.runtime.ranks import ALONE, Ranks


class DeepseekV32(UniformLM):
    """DeepSeek-V3.2, or the part of it that one of `ranks` computes."""

    config: DeepseekV32Config

    def __init__(self, c: DeepseekV32Config, ranks: Ranks = ALONE) -> None:
        def block(layer: int) -> Block:
            return SparseAttention(c, ranks, c.has_indexer(layer)), feed_forward(c, layer, ranks)

        super().__init__(c, block, c.qk_rope_head_dim, ranks)
