"""Where DeepSeek-V4's rows lie, and the making of compressed ones.

Shapes: B slots, T tokens, E hidden size, D width of a row, r tokens of a compressed row.
"""

from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpbuild.builder.models.common.layers import Positions, RMSNorm, Rope
from mtpbuild.builder.models.common.precision import cast, parameter
from mtpbuild.builder.models.deepseek_v4.config import DeepseekV4Config
from mtpbuild.plugins import rotary_rows

Angles = tuple[Tensor, Tensor]  # cos and sin [B, .., R / 2]
COMPRESSED, OPEN = "compressed", "open"


@dataclass(frozen=True)
class StreamPositions(Positions):
    """Positions with the angles of layers that compress, and of their rows."""

    far: Angles = field(kw_only=True)  # of the tokens, in these layers
    rows: dict[int, Angles] = field(kw_only=True)  # of compressed rows, by r
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


def rotate_end(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last R numbers of x [B, T, .., D] in neighbouring pairs.

    cos, sin: [B, T, R / 2].
    """
    size = 2 * cos.shape[-1]
    for _ in x.shape[3:]:
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    rest, turned = x[..., : x.shape[-1] - size], x[..., x.shape[-1] - size :]
    a, b = turned[..., 0::2], turned[..., 1::2]
    both = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([rest, both], dim=-1)


def read_ring(cache: Tensor, at: Tensor) -> Tensor:
    """Return the rows [B, .., C] of positions at [B, ..] in a ring [B, 1, S, C].

    Position p is in row p % S; of those before 0 any row is returned.
    """
    return read_rows(cache, at.clamp(min=0) % cache.shape[2])


def read_rows(cache: Tensor, at: Tensor) -> Tensor:
    """Return the rows [B, .., C] with the numbers at [B, ..] in a cache [B, 1, S, C]."""
    slots = torch.arange(at.shape[0], device=at.device).reshape(-1, *(1 for _ in at.shape[1:]))
    return cache[:, 0][slots, at]


class Compressor(nn.Module):
    """The making of compressed rows from the projections of the tokens around them.

    A layer that chooses rows makes each of two windows of r tokens, the later one the row's own.
    Its rows have an indexer's keys after the values.
    """

    def __init__(self, c: DeepseekV4Config, layer: int) -> None:
        super().__init__()
        self.ratio, self.group = c.ratio(layer), c.group(layer)
        self.windows = 1 + c.chooses(layer)
        self.widths = [c.head_dim] + c.chooses(layer) * [c.index_head_dim]
        self.proj = parameter(c.hidden_size, c.open_width(layer))
        self.position_bias = parameter(self.ratio, self.windows * sum(self.widths))
        self.norms = nn.ModuleList(RMSNorm(width, c.rms_norm_eps) for width in self.widths)

    def place_rows(self, rows: StreamPositions, tokens: int, bound: int) -> Tensor:
        """Return the numbers [B, n] of the rows to make from the base's on.

        The last one within `bound` cache rows takes the place of later ones.
        """
        numbers = torch.arange(count_made(tokens, self.ratio), device=rows.start.device)
        numbers = (rows.start // self.ratio)[:, None] + numbers
        return numbers - (numbers - (bound // self.ratio - 1)).clamp(min=0)

    def make_rows(self, opened: Tensor, numbers: Tensor, rows: StreamPositions) -> Tensor:
        """Return the rows [B, n, D + ..] of these numbers, of the projections in the ring.

        Those that are not complete are any numbers: nobody sees them.
        """
        r, W = self.ratio, self.windows
        token = torch.arange(r, device=numbers.device)
        windows = list[tuple[Tensor, Tensor]]()
        for w in range(W):
            taken = read_ring(opened, (numbers + (w + 1 - W))[..., None] * r + token)
            value, gate = taken.chunk(2, dim=-1)
            windows.append((value, gate + self.position_bias))
        ahead = (numbers - (rows.start // r)[:, None])[..., None]
        cos, sin = (part.gather(1, ahead.expand(-1, -1, part.shape[2])) for part in rows.rows[r])
        parts, at = list[Tensor](), 0
        for width, norm in zip(self.widths, self.norms, strict=True):
            value, gate = (
                torch.cat(
                    [both[i][..., at + w * width :][..., :width] for w, both in enumerate(windows)],
                    dim=2,
                )
                for i in range(2)
            )
            at += W * width
            if W > 1:  # before the first token there is no window
                there = (numbers > 0)[..., None, None] | (torch.arange(W * r) >= r)[:, None]
                gate = torch.where(there, gate, float("-inf"))
            parts.append(rotate_end(norm((value * gate.softmax(2)).sum(2)), cos, sin))
        return torch.cat(parts, dim=-1)

    def write(self, cache: Tensor, made: Tensor, numbers: Tensor, rows: StreamPositions) -> Tensor:
        """Write rows [B, n, D + ..] to the places of their last tokens in a cache [B, 1, S, C]."""
        r, g, (B, _, _, width) = self.ratio, self.group, cache.shape
        made = F.pad(made, (0, g * width - made.shape[2])).unflatten(2, (g, width))
        at = numbers[..., None] * r + torch.arange(r - g, r, device=cache.device)
        slots = torch.arange(B, device=cache.device)[:, None, None]
        idle = (rows.ring < 0)[:, None, None, None]
        new = torch.where(idle, cache[:, 0][slots, at], cast(made, cache.dtype))
        return cache.index_put((slots, torch.zeros_like(at), at), new)

    def read(self, cache: Tensor) -> list[Tensor]:
        """Return the rows [B, n, D] of a cache, and with an indexer its keys."""
        r, g = self.ratio, self.group
        count = cache.shape[2] // r
        at = torch.arange(count, device=cache.device)[:, None] * r + torch.arange(r - g, r)
        rows = cache[:, 0].index_select(1, at.flatten()).reshape(-1, count, g * cache.shape[3])
        return [*rows[..., : sum(self.widths)].split(self.widths, dim=-1)]
