"""DeepSeek-V4's residual streams: how a branch reads them, joins them, and the head's sum of them.

Shapes: B slots, T tokens, E hidden size, N streams.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpbuild.builder.models.common.precision import parameter
from mtpbuild.builder.models.deepseek_v4.config import DeepseekV4Config


def norm_plainly(x: Tensor, eps: float) -> Tensor:
    """Compute an RMSNorm over the last axis, without a weight."""
    size = x.shape[-1:]
    return F.rms_norm(x, size, x.new_ones(size), eps)


class Mixer(nn.Module):
    """The weights by which the streams enter a branch, and by which its result joins them."""

    def __init__(self, c: DeepseekV4Config) -> None:
        super().__init__()
        N = c.hc_mult
        self.streams, self.iterations, self.eps = N, c.hc_sinkhorn_iters, c.hc_eps
        self.norm_eps = c.rms_norm_eps
        self.fn = parameter(N * c.hidden_size, N * (N + 2))
        self.base, self.scale = parameter(N * (N + 2)), parameter(3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the branch's input [B, T, E] of x [B, T, N, E], and what `join_branch` takes."""
        N, eps = self.streams, self.eps
        flat = x.flatten(2)
        weights = norm_plainly(flat, self.norm_eps) @ self.fn
        factors = torch.cat([self.scale[i].expand(n) for i, n in enumerate((N, N, N * N))])
        pre, post, comb = (weights * factors + self.base).split([N, N, N * N], dim=-1)
        comb = comb.unflatten(-1, (N, N)).softmax(-1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(self.iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return ((pre.sigmoid() + eps)[..., None] * x).sum(2), 2 * post.sigmoid(), comb


def join_branch(x: Tensor, branch: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Mix the streams x [B, T, N, E], and add a branch's result [B, T, E] to each."""
    return post[..., None] * branch[..., None, :] + comb.mT @ x


class StreamHead(nn.Module):
    """The sum of the streams that norm and head read."""

    def __init__(self, c: DeepseekV4Config) -> None:
        super().__init__()
        N = c.hc_mult
        self.eps, self.norm_eps, self.streams = c.hc_eps, c.rms_norm_eps, N
        self.fn = parameter(N * c.hidden_size, N)
        self.base, self.scale = parameter(N), parameter(1)

    def forward(self, x: Tensor) -> Tensor:
        """Sum the streams x [B, T, N E] to [B, T, E]."""
        weights = norm_plainly(x, self.norm_eps) @ self.fn
        pre = (weights * self.scale + self.base).sigmoid() + self.eps
        return (pre[..., None] * x.unflatten(-1, (self.streams, -1))).sum(2)
