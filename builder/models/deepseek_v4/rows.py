"""Where DeepSeek-V4's rows lie, and the making of compressed ones.

Shapes: B slots, T tokens, E hidden size, D width of a row, r tokens of a compressed row.
"""

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor, nn

from mtpbuild.builder.models.common.layers import Positions, RMSNorm, Rope, State
from mtpbuild.builder.models.common.precision import parameter
from mtpbuild.builder.models.deepseek_v4.config import DeepseekV4Config
from mtpbuild.plugins import rotary_rows
from mtpbuild.plugins.compressed_rows.op import compressed_rows_write

Angles = tuple[Tensor, Tensor]  # cos and sin [B, .., R / 2]
COMPRESSED, OPEN = "compressed", "open"


@dataclass(frozen=True)
class StreamPositions(Positions):
    """Positions with the angles of layers that compress, and of their rows."""

    far: Angles = field(kw_only=True)  # of the tokens, in these layers
    rows: dict[int, Angles] = field(kw_only=True)  # of compressed rows from start // r on, by r
    ring: Tensor = field(kw_only=True)  # [B] start, or -1 in an idle slot


class StreamRope(Rope):
    """The angles of both kinds of layers."""

    def __init__(self, c: DeepseekV4Config) -> None:
        super().__init__(c.rope, c.qk_rope_head_dim)
        self.far = Rope(c.row_rope, c.qk_rope_head_dim)
        self.ratios = sorted({*c.ratios} - {0})

    def forward(
        self,
        start: Tensor,
        tokens: int,
        active: Tensor | None = None,
        end: int = 0,
        offset: int = 0,
    ) -> StreamPositions:
        """Place tokens as `Rope` does; a compressed row has the position of its first token."""
        near = super().forward(start, tokens, active, end, offset)
        far = self.far(start, tokens, active, end, offset)
        rows = {}
        for r in self.ratios:  # powers of two, by which a frequency is multiplied exactly
            cos, sin, *_ = rotary_rows(
                near.start // r,
                None,
                self.far.inv_freq * r,
                tokens=count_made(tokens, r),
                offset=0,
                end=0,
                scale=self.far.scale,
            )
            rows[r] = cos, sin
        ring = near.start if active is None else torch.where(active, start, -1)
        parts = {part.name: getattr(near, part.name) for part in fields(near)}
        return StreamPositions(**parts, far=(far.cos, far.sin), rows=rows, ring=ring)


def count_made(tokens: int, r: int) -> int:
    """Return how many compressed rows a pass makes: all that it may complete, and others.

    At least two, as torch.export takes a size that may be 1 for one that is.
    """
    return tokens // r + 2


class Compressor(nn.Module):
    """The making of compressed rows from the projections of the tokens around them.

    A layer that chooses rows makes each of two windows of r tokens, the later one the row's own.
    Its rows have an indexer's keys after the values.
    """

    def __init__(self, c: DeepseekV4Config, layer: int) -> None:
        super().__init__()
        self.ratio, self.group = c.ratio(layer), c.group(layer)
        self.eps = c.rms_norm_eps
        self.widths = [c.head_dim] + c.chooses(layer) * [c.index_head_dim]
        self.proj = parameter(c.hidden_size, c.open_width(layer))
        self.position_bias = parameter(self.ratio, c.open_width(layer) // 2)
        self.norms = nn.ModuleList(RMSNorm(width, c.rms_norm_eps) for width in self.widths)

    def write(self, x: Tensor, old: State, rows: StreamPositions) -> State:
        """Return the caches of compressed rows and of projections after x [B, T, E]."""
        norms = [norm.weight for norm in self.norms]
        compressed, opened = compressed_rows_write(
            x @ self.proj,
            old[COMPRESSED],
            old[OPEN],
            rows.ring,
            self.position_bias,
            norms[0],
            norms[1] if norms[1:] else None,
            *rows.rows[self.ratio],
            self.group,
            self.eps,
        )
        return {COMPRESSED: compressed, OPEN: opened}
