"""A whole model with its MTP modules, as the step program calls it."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mtpbuild.builder.models.common.blocks import look_up
from mtpbuild.builder.models.common.collectives import all_gather, all_reduce, rank_constant
from mtpbuild.builder.models.common.layers import DecoderLayer, MTPModule, RMSNorm, Rope, Rows
from mtpbuild.builder.models.common.precision import cast, parameter
from mtpbuild.builder.models.config import ModelConfig
from mtpbuild.runtime.ranks import Ranks


class CausalLM(nn.Module):
    """Main model and MTP modules; embedding and head are shared by all.

    A rank of several holds its share: of a vocabulary that is split, the rows that begin at its
    number.
    """

    def __init__(
        self,
        c: ModelConfig,
        layers: Iterable[DecoderLayer],
        modules: Iterable[MTPModule],
        rope: Rope,
        ranks: Ranks,
    ) -> None:
        super().__init__()
        V = c.vocab_size // ranks.parts
        self.config, self.ranks = c, ranks
        self.embed_tokens = parameter(V, c.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mtp = nn.ModuleList(modules)
        self.lm_head = parameter(c.hidden_size, V)
        self.rope = rope
        if ranks.parts > 1:
            self.rank = rank_constant()

    def embed(self, tokens: Tensor) -> Tensor:
        if self.ranks.parts == 1:
            return look_up(self.embed_tokens, tokens)
        rows = self.embed_tokens.shape[0]
        own = (tokens // rows == self.rank)[..., None]
        x = nn.functional.embedding(tokens % rows, self.embed_tokens)
        return all_reduce(torch.where(own, x, 0.0))

    def forward(
        self, tokens: Tensor, caches: list[Tensor], rows: Rows
    ) -> tuple[Tensor, list[Tensor]]:
        """tokens [B, T] -> hidden states after the final norm [B, T, E], and the updated caches."""
        x, updated = self.through(len(self.layers), tokens, caches, rows)
        return self.norm(x), updated

    def fill(self, tokens: Tensor, caches: list[Tensor], rows: Rows) -> list[Tensor]:
        """Write only the caches, for an engine without drafts."""
        x, updated = self.through(len(self.layers) - 1, tokens, caches, rows)
        last = self.layers[-1]
        assert isinstance(last, DecoderLayer)
        return [*updated, last.fill(x, caches[-1], rows)]

    def through(
        self, count: int, tokens: Tensor, caches: list[Tensor], rows: Rows
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the first `count` layers: the hidden states, and these layers' new caches."""
        x, updated = self.embed(tokens), list[Tensor]()
        for layer, cache in zip(self.layers[:count], caches[:count], strict=True):
            x, cache = layer(x, cache, rows)
            updated.append(cache)
        return x, updated

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits are fp32: in bf16 they tie."""
        logits = (cast(hidden, torch.float32) @ self.lm_head).float()
        return logits if self.ranks.parts == 1 else all_gather(logits, self.rank, self.ranks.parts)
