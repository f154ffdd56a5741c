"""DeepSeek-V3 with its MTP modules, as the step program calls it."""

import torch
from torch import Tensor, nn

from mtpbuild.builder.models.common.collectives import (
    all_gather,
    all_reduce,
    own_part,
    rank_constant,
)
from mtpbuild.builder.models.common.layers import DecoderLayer, RMSNorm, Rope, Rows, parameter
from mtpbuild.builder.models.common.precision import cast
from mtpbuild.builder.models.common.share import WHOLE, Share
from mtpbuild.builder.models.deepseek_v3.config import ModelConfig


class MTPModule(DecoderLayer):
    """One MTP module: `model.layers.{L+j}` of the checkpoint (spec/deepseek-v3.md section 3)."""

    def __init__(self, c: ModelConfig, layer: int, share: Share = WHOLE) -> None:
        super().__init__(c, layer, share)
        self.enorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hnorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = parameter(2 * c.hidden_size // share.parts, c.hidden_size)
        if share.parts > 1:
            self.rank = rank_constant()
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(c.hidden_size, c.rms_norm_eps)})

    def join(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Emb(t_{p+k}) and the hidden of slot p, both normed; the embedding's half comes first."""
        both = torch.cat([self.enorm(embedding), self.hnorm(hidden)], dim=-1)
        if self.share.parts == 1:
            return both @ self.eh_proj
        return all_reduce(own_part(both, self.rank, self.share.parts) @ self.eh_proj)

    def norm(self, x: Tensor) -> Tensor:
        """What the head reads, and what the next module or draft step is given."""
        return self.shared_head["norm"](x)


class DeepseekV3(nn.Module):
    """Main model and MTP modules; embedding and head are shared by all.

    A rank of several holds its share: of a vocabulary that is split, the rows that begin at its
    number.
    """

    def __init__(self, c: ModelConfig, share: Share = WHOLE) -> None:
        super().__init__()
        L, D, V = c.num_hidden_layers, c.num_nextn_predict_layers, c.vocab_size // share.parts
        self.config, self.share = c, share
        self.embed_tokens = parameter(V, c.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(c, i, share) for i in range(L))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mtp = nn.ModuleList(MTPModule(c, L + j, share) for j in range(D))
        self.lm_head = parameter(c.hidden_size, V)
        self.rope = Rope(c)
        if share.parts > 1:
            self.rank = rank_constant()

    def embed(self, tokens: Tensor) -> Tensor:
        if self.share.parts == 1:
            return nn.functional.embedding(tokens, self.embed_tokens)
        rows = self.embed_tokens.shape[0]
        own = (tokens // rows == self.rank)[..., None]
        x = nn.functional.embedding(tokens % rows, self.embed_tokens)
        return all_reduce(torch.where(own, x, 0.0))

    def forward(
        self, tokens: Tensor, caches: list[Tensor], rows: Rows
    ) -> tuple[Tensor, list[Tensor]]:
        """tokens [B, T] -> hidden states after the final norm [B, T, E], and the updated caches."""
        x, updated = self.embed(tokens), list[Tensor]()
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, cache, rows)
            updated.append(cache)
        return self.norm(x), updated

    def fill(self, tokens: Tensor, caches: list[Tensor], rows: Rows) -> list[Tensor]:
        """Only the caches, for an engine without drafts."""
        x, updated = self.embed(tokens), list[Tensor]()
        for layer, cache in zip(self.layers[:-1], caches[:-1], strict=True):
            x, cache = layer(x, cache, rows)
            updated.append(cache)
        last = self.layers[-1]
        assert isinstance(last, DecoderLayer)
        return [*updated, last.fill(x, caches[-1], rows)]

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32: bf16 logits tie."""
        logits = (cast(hidden, torch.float32) @ self.lm_head).float()
        return logits if self.share.parts == 1 else all_gather(logits, self.rank, self.share.parts)
