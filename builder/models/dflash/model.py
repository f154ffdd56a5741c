"""A DFlash or DSpark head in the step program: in place of the trunk's MTP modules."""

from torch import Tensor, nn

from mtpbuild.builder.models.common.block_head import BlockHead
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.grouped import GroupedAttention
from mtpbuild.builder.models.common.layers import (
    MLP,
    DecoderLayer,
    Positions,
    Rope,
    State,
)
from mtpbuild.builder.models.dflash.config import DFlashConfig
from mtpbuild.runtime.contract.state import name_module_rows
from mtpbuild.runtime.ranks import ALONE


def attach_dflash(model: CausalLM) -> None:
    """Put the head of a model's configuration in place of its modules."""
    c = model.config.head
    assert isinstance(c, DFlashConfig)
    DFlashHead(c).attach(model)
    model.head_rope = Rope(c.rope, c.rotary_dim)


class DFlashHead(BlockHead):
    """Qwen3's layers, over the context and a block."""

    def __init__(self, c: DFlashConfig) -> None:
        super().__init__(c)
        h, self.causal = c.hidden_size, c.causal
        self.layers = nn.ModuleList(
            DecoderLayer(
                c, GroupedAttention(c, ALONE, window=window), MLP(h, c.intermediate_size), ALONE
            )
            for window in c.windows
        )

    def write(self, context: Tensor, state: State, rows: Positions) -> State:
        new = dict[str, Tensor]()
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            name = name_module_rows(i)  # a context is not normed before the product, as a block is
            *_, new[name] = layer.self_attn.write(context, rows, state[name])
        return new

    def forward(self, x: Tensor, state: State, rows: Positions) -> Tensor:
        last = rows.first + (x.shape[1] - 1)  # of the block, which all its tokens see
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            q, fresh = layer.self_attn.project(layer.input_layernorm(x), rows)
            first = rows.first if self.causal[i] else last
            x = layer.finish(x, q, rows, state[name_module_rows(i)], fresh, first)
        return self.norm(x)
