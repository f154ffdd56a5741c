"""DeepSeek-V3.2: latent attention over the rows that an indexer chooses.

A cache row ends with the indexer's key.

Shapes: B slots, T tokens, E hidden size, H heads of the indexer, D values of each.
"""

import torch
from torch import Tensor, nn

from mtpbuild.builder.models.common.causal_lm import UniformLM
from mtpbuild.builder.models.common.layers import Positions
from mtpbuild.builder.models.common.precision import cast, parameter
from mtpbuild.builder.models.deepseek_v3.model import LatentAttention
from mtpbuild.builder.models.deepseek_v32.config import DeepseekV32Config
from mtpbuild.plugins import choose_rows, index_keys, kv_write
from mtpbuild.runtime.ranks import Ranks

EPS = 1e-6  # of the keys' norm, in every published configuration


class Indexer(nn.Module):
    """An indexer, which chooses rows by keys of its own; all ranks make the same choice."""

    def __init__(self, c: DeepseekV32Config) -> None:
        super().__init__()
        assert c.q_lora_rank is not None
        E, H, D = c.hidden_size, c.index_n_heads, c.index_head_dim
        self.config = c
        self.wq_b = parameter(c.q_lora_rank, H * D)
        self.wk = parameter(E, D)
        self.k_norm = nn.LayerNorm(D, EPS).requires_grad_(False)
        self.weights_proj = parameter(E, H)

    def keys(self, x: Tensor, rows: Positions) -> Tensor:
        """Compute the indexer's part of the cache rows of x [B, T, E]: [B, 1, T, D]."""
        norm = self.k_norm
        c = self.config
        rotation = rows.cos, rows.sin, EPS, c.indexer_rope_interleave
        return index_keys(x @ self.wk, norm.weight, norm.bias, *rotation)[:, None]

    def choose(
        self,
        q: Tensor,
        weights: Tensor,
        rows: Positions,
        cache: Tensor,
        fresh: Tensor,
        first: Tensor,
    ) -> Tensor:
        """Choose rows for queries' latents q [B, T, ..]; weights [B, T, H]: the heads'."""
        c = self.config
        place = (cache, fresh, rows.base, first)
        settings = c.index_topk, c.indexer_rope_interleave
        return choose_rows(q @ self.wq_b, weights, rows.cos, rows.sin, *place, *settings)


class SparseAttention(LatentAttention):
    """Latent attention to the rows that this layer's indexer chose, or an earlier layer's.

    With an indexer the query input is the queries' normed latent, then the indexer's head weights.
    """

    config: DeepseekV32Config

    def __init__(self, c: DeepseekV32Config, ranks: Ranks, has_indexer: bool) -> None:
        super().__init__(c, ranks)
        self.indexer = Indexer(c) if has_indexer else None

    def write(self, x: Tensor, rows: Positions, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.indexer is None:
            return super().write(x, rows, cache)
        q, fresh = self.project(x, rows)
        rounded = cast(fresh, cache.dtype)  # this pass reads the same values as later ones
        return q, cast(rounded, fresh.dtype), kv_write(cache, rounded, rows.start)

    def project(self, x: Tensor, rows: Positions) -> tuple[Tensor, Tensor]:
        q, fresh = super().project(x, rows)
        if self.indexer is None:
            return q, fresh
        weights = cast(x, torch.float32) @ self.indexer.weights_proj
        q = torch.cat([cast(q, torch.float32), weights], dim=-1)
        return q, torch.cat([fresh, self.indexer.keys(x, rows)], dim=-1)

    def attend(
        self, q: Tensor, rows: Positions, cache: Tensor, fresh: Tensor, first: Tensor
    ) -> Tensor:
        if self.indexer is not None:
            c = self.config
            q, weights = q.split([q.shape[-1] - c.index_n_heads, c.index_n_heads], dim=-1)
            q = cast(q, self.q_a_layernorm.weight.dtype)
            if not rows.choice.stays:
                place = rows, cache, fresh, first
                rows.choice.rows = self.indexer.choose(q, weights, *place)
        return super().attend(q, rows, cache, fresh, first)


def make_sparse_model(c: DeepseekV32Config, ranks: Ranks) -> UniformLM:
    def make_attention(layer: int) -> SparseAttention:
        return SparseAttention(c, ranks, c.has_indexer(layer))

    return UniformLM(c, make_attention, c.qk_rope_head_dim, ranks)
