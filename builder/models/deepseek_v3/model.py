"""DeepSeek-V3 with its MTP modules: each layer's attention and feed-forward."""

from mtpbuild.builder.models.common.causal_lm import Block, UniformLM
from mtpbuild.builder.models.common.moe import feed_forward
from mtpbuild.builder.models.deepseek_v3.attention import LatentAttention
from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config
from mtpbuild.runtime.ranks import ALONE, Ranks


class DeepseekV3(UniformLM):
    """DeepSeek-V3, or the part of it that one of `ranks` computes."""

    config: DeepseekV3Config

    def __init__(self, c: DeepseekV3Config, ranks: Ranks = ALONE) -> None:
        def block(layer: int) -> Block:
            return LatentAttention(c, ranks), feed_forward(c, layer, ranks)

        super().__init__(c, block, c.qk_rope_head_dim, ranks)
