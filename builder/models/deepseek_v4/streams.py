"""DeepSeek-V4's residual streams: how a branch reads them, joins them, and the head's sum of them.

Shapes: B slots, T tokens, E hidden size, N streams.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from mtpbuild.builder.models.common.layers import RMSNorm
from mtpbuild.builder.models.common.precision import parameter
from mtpbuild.builder.models.deepseek_v4.config import DeepseekV4Config
from mtpbuild.plugins.mix_streams.op import (
    join_branch,
    mix_joined_streams,
    mix_streams,
    sum_streams,
)


@dataclass(frozen=True)
class Streams:
    """Residual streams, which the result of the last branch has still to join."""

    x: Tensor  # [B, T, N E]
    branch: tuple[Tensor, ...] = ()  # the result [B, T, E], and its weights

    def join(self) -> Tensor:
        return join_branch(self.x, *self.branch) if self.branch else self.x

    def average(self, count: int) -> Tensor:
        """Return the mean [B, T, E] of the `count` streams, by additions alone."""
        first, *others = self.join().chunk(count, dim=-1)
        return sum(others, first) / count


class Mixer(nn.Module):
    """The weights by which the streams enter a branch, and by which its result joins them."""

    def __init__(self, c: DeepseekV4Config) -> None:
        super().__init__()
        N = c.hc_mult
        self.sizes = c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps
        self.fn = parameter(N * c.hidden_size, N * (N + 2))
        self.base, self.scale = parameter(N * (N + 2)), parameter(3)

    def forward(self, streams: Streams, norm: RMSNorm) -> tuple[Tensor, Tensor, Tensor]:
        """Return the joined streams, the branch's input, and the weights of its result."""
        operands = streams.x, self.fn, self.base, self.scale, norm.weight
        if not streams.branch:
            return streams.x, *mix_streams(*operands, *self.sizes)
        y, weights, x = mix_joined_streams(*operands, *streams.branch, *self.sizes)
        return x, y, weights


class StreamHead(nn.Module):
    """The sum of the streams that the head reads."""

    def __init__(self, c: DeepseekV4Config) -> None:
        super().__init__()
        N = c.hc_mult
        self.sizes = c.hc_eps, c.rms_norm_eps
        self.fn = parameter(N * c.hidden_size, N)
        self.base, self.scale = parameter(N), parameter(1)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Sum the streams x [B, T, N E] to [B, T, E], normed."""
        return sum_streams(x, self.fn, self.base, self.scale, norm.weight, *self.sizes)
