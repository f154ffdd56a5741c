"""rope: rotate each pair of a head's values by its position's angle."""

import torch
from torch import Tensor

from mtpbuild.plugins.definition import define


@define(lambda x: torch.empty_like(x))
def rope(x: Tensor, cos: Tensor, sin: Tensor, heads: int, interleaved: bool) -> Tensor:
    """Rotate x [B, T, heads * W] by cos, sin [B, T, R / 2] fp32; the result has x's layout.

    The first R <= W values of each head are rotated. interleaved: pairs are (0, 1), (2, 3), .. as
    in DeepSeek's checkpoints; otherwise they are (0, R / 2), (1, R / 2 + 1), ..
    """
    y = x.unflatten(-1, (heads, -1))
    rotary = 2 * cos.shape[-1]
    y, rest = y[..., :rotary], y[..., rotary:]
    cos, sin = cos[:, :, None], sin[:, :, None]
    a, b = (y[..., 0::2], y[..., 1::2]) if interleaved else y.chunk(2, dim=-1)
    c, d = a * cos - b * sin, b * cos + a * sin
    y = torch.stack([c, d], -1).flatten(-2) if interleaved else torch.cat([c, d], -1)
    y = y.to(x.dtype)
    if rest.shape[-1]:
        y = torch.cat([y, rest], -1)
    return y.flatten(-2).contiguous()
