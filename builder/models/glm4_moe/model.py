"""GLM-4.5 with its MTP module: its layers' attention and feed-forward, and its weight table."""

from collections.abc import Iterator

from torch import nn

from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.grouped import GroupedAttention, grouped_weights
from mtpbuild.builder.models.common.layers import Attention, DecoderLayer, MTPModule, Rope
from mtpbuild.builder.models.common.moe import feed_forward
from mtpbuild.builder.models.common.moe_weights import feed_forward_weights
from mtpbuild.builder.models.config import ModelConfig
from mtpbuild.builder.models.glm4_moe.config import Glm4MoeConfig
from mtpbuild.builder.weights.made import (
    Share,
    Weight,
    decoder_layer,
    module_weights,
    whole_table,
)
from mtpbuild.runtime.ranks import ALONE, Ranks


class Glm4Moe(CausalLM):
    """Is the part of the model that one of `ranks` computes."""

    config: Glm4MoeConfig

    def __init__(self, c: Glm4MoeConfig, ranks: Ranks = ALONE) -> None:
        def block(layer: int) -> tuple[ModelConfig, Attention, nn.Module, Ranks]:
            return c, GroupedAttention(c, ranks), feed_forward(c, layer, ranks), ranks

        L, D = c.num_hidden_layers, c.num_nextn_predict_layers
        layers = (DecoderLayer(*block(i)) for i in range(L))
        modules = (MTPModule(*block(L + j)) for j in range(D))
        super().__init__(c, layers, modules, Rope(c.rope, c.rotary_dim), ranks)


def weight_table(c: Glm4MoeConfig, share: Share) -> list[Weight]:
    """Returns every weight of main model and MTP modules, in the order of use."""

    def layer(index: int, to: str) -> Iterator[Weight]:
        at = f"model.layers.{index}"
        attention = grouped_weights(c, f"{at}.self_attn", f"{to}.self_attn")
        mlp = feed_forward_weights(c, share, index, f"{at}.mlp", f"{to}.mlp")
        return decoder_layer(c, at, to, attention, mlp)

    return whole_table(c, layer, module_weights(c, layer))
