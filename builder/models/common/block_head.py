"""A head in the step program that drafts a block of tokens in one pass.

Shapes: B slots, T tokens of the trunk, k tokens of a block, E hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mtpbuild.builder.models.common.block_config import BlockHeadConfig
from mtpbuild.builder.models.common.blocks import look_up
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.collectives import all_gather
from mtpbuild.builder.models.common.layers import Positions, RMSNorm, State
from mtpbuild.builder.models.common.precision import parameter


class BlockHead(nn.Module):
    """The parts that such heads share; its layers' rows are of a context, which the trunk makes."""

    embed_tokens = lm_head = None  # the trunk's

    def __init__(self, c: BlockHeadConfig) -> None:
        super().__init__()
        self.block = c
        h, eps = c.hidden_size, c.rms_norm_eps
        self.fc = parameter(len(c.taps) * h, h)
        self.hidden_norm, self.norm = RMSNorm(h, eps), RMSNorm(h, eps)
        if c.markov_rank:
            self.markov_w1 = parameter(c.vocab_size, c.markov_rank)
            self.markov_w2 = parameter(c.markov_rank, c.vocab_size)

    def attach(self, model: CausalLM) -> None:
        """Take the place of a model's modules."""
        model.mtp = nn.ModuleList([self])
        model.taps, model.join_taps = self.block.taps, self.join_taps

    def join_taps(self, taps: list[Tensor], hidden: Tensor) -> Tensor:
        """Return the context [B, T, E] of verified tokens from the taps."""
        return self.hidden_norm(torch.cat(taps, dim=-1) @ self.fc)

    def write(self, context: Tensor, state: State, rows: Positions) -> State:
        """Return the caches of all layers with the context's rows."""
        raise NotImplementedError

    def forward(self, x: Tensor, state: State, rows: Positions) -> Tensor:
        """Run a block's embeddings [B, k, E]; return what the trunk's head multiplies."""
        raise NotImplementedError

    def compute_head_input(self, hidden: Tensor) -> Tensor:
        return hidden

    def add_bias(self, model: CausalLM, logits: Tensor, token: Tensor) -> Tensor:
        """Add to logits [B, 1, V] what the token [B, 1] before says of its follower."""
        if not self.block.markov_rank:
            return logits
        second: Any = self.markov_w2
        return logits + model.head(look_up(self.markov_w1, token), second, all_gather)
