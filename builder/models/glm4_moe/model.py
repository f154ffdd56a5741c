"""GLM-4.5 with its MTP module: its layers' attention and feed-forward."""

from mtpbuild.builder.models.common.causal_lm import Block, UniformLM
from mtpbuild.builder.models.common.grouped import GroupedAttention
from mtpbuild.builder.models.common.moe import feed_forward
from mtpbuild.builder.models.glm4_moe.config import Glm4MoeConfig
from mtpbuild.runtime.ranks import ALONE, Ranks


class Glm4Moe(UniformLM):
    """GLM-4.5, or the part of it that one of `ranks` computes."""

    config: Glm4MoeConfig

    def __init__(self, c: Glm4MoeConfig, ranks: Ranks = ALONE) -> None:
        def block(layer: int) -> Block:
            return GroupedAttention(c, ranks), feed_forward(c, layer, ranks)

        super().__init__(c, block, c.rotary_dim, ranks)
