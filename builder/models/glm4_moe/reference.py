"""The plain model: GLM-4.5 with its MTP module."""

from mtpbuild.builder.models.common.plain import MLP, Block, GroupedAttention, MoE, PlainModel
from mtpbuild.builder.models.glm4_moe.config import Glm4MoeConfig


class Plain(PlainModel):
    config: Glm4MoeConfig

    def __init__(self, config: Glm4MoeConfig) -> None:
        def block(layer: int) -> Block:
            moe = config.is_moe(layer)
            mlp = MoE(config) if moe else MLP(config.hidden_size, config.intermediate_size)
            return GroupedAttention(config), mlp

        super().__init__(config, block, config.rotary_dim)
