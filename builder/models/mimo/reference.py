"""The plain model: MiMo-7B with its MTP module, whose tensors have names of their own."""

import torch
from torch import Tensor, nn

from mtpbuild.builder.models.common.plain import (
    Block,
    PlainCausalLM,
    PlainDecoderLayer,
    PlainGroupedAttention,
    PlainMLP,
    PlainMTPModule,
    PlainRMSNorm,
    PlainTrunk,
)
from mtpbuild.builder.models.mimo.config import MimoConfig


class PlainMimoModule(PlainMTPModule):
    """The checkpoint's `model.mtp_layers.{j}`; in its input the hidden state comes first."""

    def __init__(self, c: MimoConfig, block: Block) -> None:
        PlainDecoderLayer.__init__(self, c, block)
        self.token_layernorm = PlainRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_layernorm = PlainRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.final_layernorm = PlainRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.input_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)

    def own(self, name: str) -> None:
        """Return None: the module has no embedding and no head of its own."""

    def draft(self, embedding: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        halves = [self.hidden_layernorm(hidden), self.token_layernorm(embedding)]
        return PlainDecoderLayer.forward(self, self.input_proj(torch.cat(halves, dim=-1)), cos, sin)

    def normed(self, x: Tensor) -> Tensor:
        return self.final_layernorm(x)


class PlainMimo(PlainCausalLM):
    config: MimoConfig

    def __init__(self, config: MimoConfig) -> None:
        def block(layer: int) -> Block:
            return PlainGroupedAttention(config), PlainMLP(
                config.hidden_size, config.intermediate_size
            )

        super().__init__(config, block, config.rotary_dim)

    def make_module(self, block: Block, j: int) -> PlainMTPModule:
        assert isinstance(self.config, MimoConfig)
        return PlainMimoModule(self.config, block)

    def join(self, trunk: list[PlainDecoderLayer], modules: list[PlainMTPModule]) -> PlainTrunk:
        model = PlainTrunk(self.config, trunk)
        model.mtp_layers = nn.ModuleList(modules)
        return model

    def module(self, k: int) -> PlainMTPModule:
        modules = self.model.mtp_layers
        assert isinstance(modules, nn.ModuleList)
        module = modules[k - 1]
        assert isinstance(module, PlainMimoModule)
        return module
