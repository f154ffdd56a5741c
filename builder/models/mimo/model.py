"""MiMo-7B with its MTP module: its layers' attention and feed-forward."""

from mtpbuild.builder.models.common.causal_lm import Block, UniformLM
from mtpbuild.builder.models.common.grouped import GroupedAttention
from mtpbuild.builder.models.common.layers import MLP
from mtpbuild.builder.models.mimo.config import MimoConfig
from mtpbuild.runtime.ranks import ALONE, Ranks


class Mimo(UniformLM):
    """MiMo-7B, or the part of it that one of `ranks` computes."""

    config: MimoConfig

    def __init__(self, c: MimoConfig, ranks: Ranks = ALONE) -> None:
        def block(layer: int) -> Block:
            inner = c.intermediate_size // ranks.parts
            return GroupedAttention(c, ranks), MLP(c.hidden_size, inner)

        super().__init__(c, block, c.rotary_dim, ranks)
