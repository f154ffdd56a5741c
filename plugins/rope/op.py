"""rope: rotate each pair of a head by its position's angle."""

import torch
from torch import Tensor


@torch.library.custom_op("mtpbuild::rope", mutates_args=())
def rope(x: Tensor, cos: Tensor, sin: Tensor, heads: int, interleaved: bool) -> Tensor:
    """Rotate x [B, T, heads * R] by cos, sin [B, T, R / 2] fp32; the layout stays as it was.

    interleaved: pairs are (0, 1), (2, 3), .. as in DeepSeek's checkpoints, else (0, R/2), ..
    Source: spec/deepseek-v3.md section 2.1, "Rotation layout".
    """
    y = x.unflatten(-1, (heads, -1))
    cos, sin = cos[:, :, None], sin[:, :, None]
    a, b = (y[..., 0::2], y[..., 1::2]) if interleaved else y.chunk(2, dim=-1)
    c, d = a * cos - b * sin, b * cos + a * sin
    y = torch.stack([c, d], -1).flatten(-2) if interleaved else torch.cat([c, d], -1)
    return y.flatten(-2).to(x.dtype).contiguous()


rope.register_fake(lambda x, *others: torch.empty_like(x))
