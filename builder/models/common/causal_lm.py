"""A whole model with its MTP modules, as the step program calls it."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mtpbuild.builder.models.common.blocks import look_up
from mtpbuild.builder.models.common.collectives import all_gather, all_reduce, rank_constant
from mtpbuild.builder.models.common.layers import DecoderLayer, MTPModule, RMSNorm, Rope, Rows
from mtpbuild.builder.models.common.precision import cast, parameter
from mtpbuild.builder.models.config import ModelConfig
from mtpbuild.plugins import matmul_wide
from mtpbuild.runtime.ranks import Ranks

NEVER = -1e30  # a logit; finite, as it is divided by temperatures


class CausalLM(nn.Module):
    """Trunk and MTP modules. The trunk's embedding and head are every module's that has no own.

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
        for j in c.own_embeddings:
            self.module(j).embed_tokens = parameter(V, c.hidden_size)
        drafted = len(c.draft_ids) or V
        for j in c.own_heads:
            self.module(j).lm_head = parameter(c.hidden_size, drafted)
        self.draft_head: nn.Parameter | None = None
        if c.draft_ids:
            self.draft_head = parameter(c.hidden_size, drafted)
            self.register_buffer("draft_ids", torch.tensor(c.draft_ids), persistent=False)
        self.draft_ids: Tensor
        if ranks.parts > 1:
            self.rank = rank_constant()

    def module(self, j: int) -> MTPModule:
        module = self.mtp[j]
        assert isinstance(module, MTPModule)
        return module

    def embed(self, tokens: Tensor, table: Tensor | None = None) -> Tensor:
        """Rows of the trunk's embedding, or of another table."""
        table = self.embed_tokens if table is None else table
        if self.ranks.parts == 1:
            return look_up(table, tokens)
        rows = table.shape[0]
        own = (tokens // rows == self.rank)[..., None]
        x = nn.functional.embedding(tokens % rows, table)
        return all_reduce(torch.where(own, x, 0.0))

    def forward(
        self, tokens: Tensor, caches: list[Tensor], rows: Rows
    ) -> tuple[Tensor, list[Tensor]]:
        """tokens [B, T] -> hidden states as modules are given them [B, T, E], and new caches."""
        x, updated = self.through(range(len(self.layers)), self.embed(tokens), caches, rows)
        return self.handed_on(x), updated

    def handed_on(self, x: Tensor) -> Tensor:
        """What the last layer returned, as modules and `logits` take it."""
        return self.norm(x) if self.config.mtp.trunk_normed else x

    def fill(self, tokens: Tensor, caches: list[Tensor], rows: Rows) -> list[Tensor]:
        """Write only the caches, for an engine without drafts."""
        before = range(len(self.layers) - 1)
        x, updated = self.through(before, self.embed(tokens), caches[:-1], rows)
        last = self.layers[-1]
        assert isinstance(last, DecoderLayer)
        return [*updated, last.fill(x, caches[-1], rows)]

    def through(
        self, layers: range, x: Tensor, caches: list[Tensor], rows: Rows
    ) -> tuple[Tensor, list[Tensor]]:
        """Run some layers on hidden states x [B, T, E]: what they make of it, and new caches."""
        updated = list[Tensor]()
        for i, cache in zip(layers, caches, strict=True):
            x, cache = self.layers[i](x, cache, rows)
            updated.append(cache)
        return x, updated

    def logits(self, hidden: Tensor) -> Tensor:
        """What `forward` returned -> the trunk's logits."""
        if not self.config.mtp.trunk_normed:
            hidden = self.norm(hidden)
        return self.head(hidden, self.lm_head)

    def draft_input(self, j: int, tokens: Tensor, hidden: Tensor, rows: Rows) -> Tensor:
        """The input of module j: tokens [B, T], hidden states [B, T, E] and where they stand."""
        module = self.module(j)
        return module.join(self.embed(tokens, module.embed_tokens), hidden, rows)

    def draft_logits(self, j: int, hidden: Tensor) -> Tensor:
        """What module j has handed on -> its logits over the whole vocabulary.

        Of a reduced draft vocabulary the head has those rows alone; other tokens are never drafted.
        """
        module = self.module(j)
        shared = self.lm_head if self.draft_head is None else self.draft_head
        head = shared if module.lm_head is None else module.lm_head
        logits = self.head(module.read_by_head(hidden), head)
        if self.draft_head is None:
            return logits
        every = logits.new_full((*logits.shape[:-1], self.config.vocab_size), NEVER)
        return every.scatter(-1, self.draft_ids.expand_as(logits), logits)

    def head(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Logits are fp32, of a head in bf16 too: rounded to bf16 they tie."""
        if isinstance(weight, Tensor) and weight.dtype == torch.bfloat16:
            logits = matmul_wide(cast(hidden, torch.bfloat16), weight)
        else:
            logits = (cast(hidden, torch.float32) @ weight).float()
        return logits if self.ranks.parts == 1 else all_gather(logits, self.rank, self.ranks.parts)
