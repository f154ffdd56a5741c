"""DeepSeek-V4's attention to a window of rows and to compressed rows.

Shapes: B slots, T tokens, E hidden size, H heads, D width of a head (and of a row, which is key
and value), G groups of heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpbuild.builder.models.common.layers import RMSNorm, State
from mtpbuild.builder.models.common.precision import cast, parameter
from mtpbuild.builder.models.deepseek_v4.config import DeepseekV4Config
from mtpbuild.builder.models.deepseek_v4.rows import (
    COMPRESSED,
    OPEN,
    Angles,
    Compressor,
    StreamPositions,
    read_rows,
    rotate_end,
)
from mtpbuild.builder.models.deepseek_v4.streams import norm_plainly
from mtpbuild.plugins.grouped_rows.op import write_ring


class RowIndexer(nn.Module):
    """The choice of compressed rows."""

    def __init__(self, c: DeepseekV4Config) -> None:
        super().__init__()
        self.heads, self.count = c.index_n_heads, c.index_topk
        self.q_b_proj = parameter(c.q_lora_rank, c.index_n_heads * c.index_head_dim)
        self.weights_proj = parameter(c.hidden_size, c.index_n_heads)

    def choose(
        self, x: Tensor, latent: Tensor, keys: Tensor, seen: Tensor, angles: Angles
    ) -> Tensor:
        """Return which of the rows that are seen [B, T, n] are chosen; keys [B, n, D]."""
        q = rotate_end((latent @ self.q_b_proj).unflatten(-1, (self.heads, -1)), *angles)
        size = q.shape[-1]
        raw = (q.flatten(1, 2) @ keys.mT).unflatten(1, (x.shape[1], self.heads))
        weights = (x @ self.weights_proj) * self.heads**-0.5
        scores = (weights[..., None] * raw.relu() * size**-0.5).sum(2)
        scores = F.pad(
            scores.masked_fill(~seen, float("-inf")), (0, self.count), value=float("-inf")
        )
        best = scores.topk(self.count, dim=-1).indices
        none = torch.zeros_like(scores, dtype=torch.bool)
        return none.scatter(-1, best, True)[..., : seen.shape[-1]] & seen


class StreamAttention(nn.Module):
    """Attention to a window of rows and to compressed rows, with a sink for each head."""

    def __init__(self, c: DeepseekV4Config, layer: int) -> None:
        super().__init__()
        E, H, D = c.hidden_size, c.num_attention_heads, c.head_dim
        self.config, self.ratio = c, c.ratio(layer)
        self.qkv_a_proj = parameter(E, c.q_lora_rank + D)
        self.q_a_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = parameter(c.q_lora_rank, H * D)
        self.kv_norm = RMSNorm(D, c.rms_norm_eps)
        self.sinks = parameter(H)
        self.compressor = Compressor(c, layer) if self.ratio else None
        self.indexer = RowIndexer(c) if c.chooses(layer) else None
        for g in range(c.o_groups):
            self.register_parameter(f"o_a_{g}", parameter(H * D // c.o_groups, c.o_lora_rank))
        self.o_b_proj = parameter(c.o_groups * c.o_lora_rank, E)

    def angles(self, rows: StreamPositions) -> Angles:
        return rows.far if self.ratio else (rows.cos, rows.sin)

    def project(self, x: Tensor, rows: StreamPositions) -> tuple[Tensor, Tensor]:
        """Return the queries' latent and the fresh rows [B, T, D] of x [B, T, E]."""
        c = self.config
        latent, row = (x @ self.qkv_a_proj).split([c.q_lora_rank, c.head_dim], dim=-1)
        return self.q_a_norm(latent), rotate_end(self.kv_norm(row), *self.angles(rows))

    def compress(self, x: Tensor, old: State, rows: StreamPositions) -> State:
        """Return the caches of compressed rows and of projections after x [B, T, E]."""
        if self.compressor is None:
            return {}
        projected = cast(x @ self.compressor.proj, old[OPEN].dtype)
        opened = write_ring(old[OPEN], projected[:, None], rows.ring)
        numbers = self.compressor.place_rows(rows, x.shape[1], old[COMPRESSED].shape[2])
        made = self.compressor.make_rows(opened, numbers, rows)
        compressed = self.compressor.write(old[COMPRESSED], made, numbers, rows)
        return {COMPRESSED: compressed, OPEN: opened}

    def attend(
        self,
        x: Tensor,
        latent: Tensor,
        rows: StreamPositions,
        near: Tensor,
        first: Tensor,
        compressed: Tensor | None,
    ) -> Tensor:
        """Attend from x and the queries' latent [B, T, ..]; return [B, T, E].

        near [B, W - 1 + F, D]: the rows from position base - (W - 1) on. compressed: the cache of
        compressed rows. Query t has position base + first [B] + t.
        """
        W, angles = self.config.sliding_window, self.angles(rows)
        later = first[:, None] + torch.arange(x.shape[1], device=first.device)  # [B, T]
        at = torch.arange(near.shape[1], device=first.device) - (W - 1)
        ahead = later[..., None] - at  # [B, T, rows]
        seen = (ahead >= 0) & (ahead < W) & (rows.base[:, None, None] + at >= 0)
        keys = near
        if self.compressor is not None and compressed is not None:
            entries, *index = self.compressor.read(compressed)
            complete = (rows.base[:, None] + later + 1) // self.ratio
            chosen = torch.arange(entries.shape[1], device=first.device) < complete[..., None]
            if self.indexer is not None:
                chosen = self.indexer.choose(x, latent, index[0], chosen, angles)
            keys, seen = torch.cat([near, entries], dim=1), torch.cat([seen, chosen], dim=-1)
        return self.weigh(latent, angles, keys, seen)

    def attend_block(
        self, latent: Tensor, rows: StreamPositions, cache: Tensor, fresh: Tensor
    ) -> Tensor:
        """Attend from a block to W rows of the cache before the base and to the fresh rows.

        All tokens see the same rows: fresh [B, T, D] are the block's own.
        """
        W = self.config.sliding_window
        before = rows.base[:, None] + torch.arange(-W, 0, device=rows.base.device)
        near = cast(read_rows(cache, before.clamp(min=0)), fresh.dtype)
        seen = torch.cat([before >= 0, torch.ones_like(fresh[..., 0], dtype=torch.bool)], dim=1)
        keys = torch.cat([near, fresh], dim=1)
        return self.weigh(latent, self.angles(rows), keys, seen[:, None])

    def weigh(self, latent: Tensor, angles: Angles, keys: Tensor, seen: Tensor) -> Tensor:
        """Weigh the rows keys [B, n, D] that are seen [B, T, n]; return [B, T, E]."""
        c, (H, D) = self.config, (self.config.num_attention_heads, self.config.head_dim)
        q = (latent @ self.q_b_proj).unflatten(-1, (H, D))
        q = rotate_end(norm_plainly(q, c.rms_norm_eps), *angles).transpose(1, 2)
        scores = (q @ keys[:, None].mT) * D**-0.5
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        sinks = self.sinks[:, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        o = (weights @ keys[:, None]).transpose(1, 2)  # [B, T, H, D]
        cos, sin = angles
        groups = rotate_end(o, cos, -sin).unflatten(2, (c.o_groups, -1)).flatten(3).unbind(2)
        parts = [part @ getattr(self, f"o_a_{g}") for g, part in enumerate(groups)]
        return torch.cat(parts, dim=-1) @ self.o_b_proj
