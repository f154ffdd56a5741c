"""DeepSeek-V3 with its MTP modules: puts together each layer's attention and feed-forward."""

from torch import nn

from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.layers import Attention, DecoderLayer, MTPModule, Rope
from mtpbuild.builder.models.common.moe import feed_forward
from mtpbuild.builder.models.config import ModelConfig
from mtpbuild.builder.models.deepseek_v3.attention import LatentAttention
from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config
from mtpbuild.runtime.ranks import ALONE, Ranks


class DeepseekV3(CausalLM):
    """Is the part of the model that one of `ranks` computes."""

    config: DeepseekV3Config

    def __init__(self, c: DeepseekV3Config, ranks: Ranks = ALONE) -> None:
        def block(layer: int) -> tuple[ModelConfig, Attention, nn.Module, Ranks]:
            return c, LatentAttention(c, ranks), feed_forward(c, layer, ranks), ranks

        L, D = c.num_hidden_layers, c.num_nextn_predict_layers
        super().__init__(
            c,
            (DecoderLayer(*block(i)) for i in range(L)),
            (MTPModule(*block(L + j)) for j in range(D)),
            Rope(c.rope, c.qk_rope_head_dim),
            ranks,
        )
