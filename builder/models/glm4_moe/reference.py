"""The plain model: GLM-4.5 with its MTP module."""

from mtpbuild.builder.models.common.plain import (
    Block,
    PlainCausalLM,
    PlainGroupedAttention,
    make_plain_feed_forward,
)
from mtpbuild.builder.models.glm4_moe.config import Glm4MoeConfig


class PlainGlm4Moe(PlainCausalLM):
    config: Glm4MoeConfig

    def __init__(self, config: Glm4MoeConfig) -> None:
        def block(layer: int) -> Block:
            return PlainGroupedAttention(config), make_plain_feed_forward(config, layer)

        super().__init__(config, block, config.rotary_dim)
