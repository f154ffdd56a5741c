"""DeepSeek-V4's attention to a window of rows and to compressed rows.

Shapes: B slots, T tokens, E hidden size, H heads, D width of a head (and of a row, which is key
and value), G groups of heads.
"""

from torch import Tensor, nn

from mtpbuild.builder.models.common.blocks import multiply_by_group
from mtpbuild.builder.models.common.layers import RMSNorm, State
from mtpbuild.builder.models.common.precision import parameter
from mtpbuild.builder.models.deepseek_v4.config import DeepseekV4Config
from mtpbuild.builder.models.deepseek_v4.rows import (
    COMPRESSED,
    Angles,
    Compressor,
    StreamPositions,
)
from mtpbuild.plugins.compressed_attention.op import choose_compressed, compressed_attention
from mtpbuild.plugins.stream_rows.op import stream_rows, stream_rows_write


class RowIndexer(nn.Module):
    """The choice of compressed rows."""

    def __init__(self, c: DeepseekV4Config) -> None:
        super().__init__()
        self.heads, self.count = c.index_n_heads, c.index_topk
        self.q_b_proj = parameter(c.q_lora_rank, c.index_n_heads * c.index_head_dim)
        self.weights_proj = parameter(c.hidden_size, c.index_n_heads)

    def choose(
        self, x: Tensor, latent: Tensor, cache: Tensor, place: tuple[Tensor, ...], rows: Compressor
    ) -> Tensor:
        """Return the numbers [B, T, k] of the rows that x's tokens attend to.

        place: the angles of the tokens, then base and first [B].
        """
        operands = latent @ self.q_b_proj, x @ self.weights_proj, *place[:2], cache, *place[2:]
        return choose_compressed(*operands, self.count, rows.ratio, rows.group, rows.widths[0])


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
        self.o_a_proj = parameter(H * D // c.o_groups, c.o_groups * c.o_lora_rank)
        self.o_b_proj = parameter(c.o_groups * c.o_lora_rank, E)

    def angles(self, rows: StreamPositions) -> Angles:
        return rows.far if self.ratio else (rows.cos, rows.sin)

    def project(self, x: Tensor, rows: StreamPositions) -> tuple[Tensor, Tensor]:
        """Return the queries' latent and the fresh rows [B, 1, T, D] of x [B, T, E]."""
        return stream_rows(*self.list_operands(x, rows), self.config.rms_norm_eps)

    def write(
        self, x: Tensor, cache: Tensor, rows: StreamPositions, start: Tensor, *, ring: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Do `project`, and write the rows into a cache at start [B]; return it, too."""
        operands = self.list_operands(x, rows)
        return stream_rows_write(*operands, cache, start, self.config.rms_norm_eps, ring)

    def list_operands(self, x: Tensor, rows: StreamPositions) -> tuple[Tensor, ...]:
        norms = self.q_a_norm.weight, self.kv_norm.weight
        return x @ self.qkv_a_proj, *norms, *self.angles(rows)

    def attend(
        self,
        x: Tensor,
        latent: Tensor,
        rows: StreamPositions,
        caches: State,
        fresh: Tensor,
        first: Tensor,
        written: bool = True,
        wider: int = 0,
    ) -> Tensor:
        """Attend from x and the queries' latent [B, T, ..]; return [B, T, E].

        fresh [B, 1, F, D]: the rows from the base on, also in the caches if they are written.
        Query t has position base + first [B] + t. wider: rows that are seen beyond the window.
        """
        c, rule = self.config, self.compressor
        cos, sin = self.angles(rows)
        compressed, chosen = caches.get(COMPRESSED), None
        if self.indexer is not None and rule is not None and compressed is not None:
            place = cos, sin, rows.base, first
            chosen = self.indexer.choose(x, latent, compressed, place, rule)
        o = compressed_attention(
            latent @ self.q_b_proj,
            self.sinks,
            cos,
            sin,
            caches["kv"],
            rows.base,
            first,
            fresh,
            compressed,
            chosen,
            window=c.sliding_window + wider,
            ratio=max(1, self.ratio),
            group=1 if rule is None else rule.group,
            written=written,
            eps=c.rms_norm_eps,
        )
        return multiply_by_group(o, self.o_a_proj, c.o_groups) @ self.o_b_proj
