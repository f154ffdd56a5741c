"""DeepSeek-V4's DSpark head in the step program: layers over streams, without compressed rows.

Shapes: B slots, k tokens of a block, E hidden size, D width of a row, W rows of a window.
"""

import torch
from torch import Tensor, nn

from mtpbuild.builder.models.common.block_head import BlockHead
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.layers import Positions, State
from mtpbuild.builder.models.deepseek_v4.config import DSparkConfig
from mtpbuild.builder.models.deepseek_v4.model import StreamLayer
from mtpbuild.builder.models.deepseek_v4.rows import StreamPositions
from mtpbuild.builder.models.deepseek_v4.streams import StreamHead, Streams
from mtpbuild.runtime.contract.state import name_module_rows


def attach_dspark(model: CausalLM) -> None:
    """Put the head of a model's configuration in place of its modules."""
    c = model.config.head
    assert isinstance(c, DSparkConfig)
    DSparkHead(c).attach(model)


class DSparkHead(BlockHead):
    """The head's layers; all tokens of a block see W rows of the context, and the block."""

    def __init__(self, c: DSparkConfig) -> None:
        super().__init__(c)
        self.config = c
        self.layers = nn.ModuleList(
            StreamLayer(c, c.num_hidden_layers + i) for i in range(c.stages)
        )
        self.hc_head = StreamHead(c)

    def write(self, context: Tensor, state: State, rows: Positions) -> State:
        assert isinstance(rows, StreamPositions)
        new = dict[str, Tensor]()
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, StreamLayer)
            cache = state[name := name_module_rows(i)]
            *_, new[name] = layer.self_attn.write(context, cache, rows, rows.start, ring=False)
        return new

    def forward(self, x: Tensor, state: State, rows: Positions) -> Tensor:
        assert isinstance(rows, StreamPositions)
        last = rows.first + (x.shape[1] - 1)  # of the block, which all its tokens see
        streams = Streams(torch.cat(self.config.hc_mult * [x], dim=-1))
        none = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)  # no layer is hashed
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, StreamLayer)
            joined, y, weights = layer.attn_hc(streams, layer.input_layernorm)
            latent, fresh = layer.self_attn.project(y, rows)
            place = {"kv": state[name_module_rows(i)]}, fresh, last
            y = layer.self_attn.attend(y, latent, rows, *place, written=False, wider=none.shape[1])
            streams = layer.finish(Streams(joined, (y, weights)), none)
        hidden: Tensor = self.hc_head(streams.join(), self.norm)
        return hidden
