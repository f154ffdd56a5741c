"""llama.cpp's formats of 4.5 bits a weight, by formulas of our own, to compare ours with.

Q4_K here has no importance matrix. Its superblocks are a whole row where that is shorter than 256.
"""

import torch
from torch import Tensor

BLOCK, SUPERBLOCK, LEVELS, STEPS = 32, 256, 15, 21


def round_q4_0(weight: Tensor) -> Tensor:
    """Round to Q4_0: the value of largest magnitude becomes -8."""
    blocks = weight.unflatten(-1, (-1, BLOCK))
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = extreme / -8
    inverse = torch.where(scale != 0, 1 / scale, 0.0)
    codes = (blocks * inverse + 8.5).floor().clamp(0, LEVELS) - 8
    return (codes * scale.half().float()).flatten(-2)


def round_q4_k(weight: Tensor) -> Tensor:
    """Round to Q4_K: scale times code minus offset, both from six bits and a superblock's fp16."""
    blocks = weight.unflatten(-1, (-1, BLOCK))
    scale, offset = _fit(blocks)
    whole = [_shared(each) for each in (scale, offset)]
    scale, offset = (each[..., None] for each in whole)
    codes = ((blocks + offset) * torch.where(scale != 0, 1 / scale, 0.0)).round().clamp(0, LEVELS)
    return (codes * scale - offset).flatten(-2)


def _shared(values: Tensor) -> Tensor:
    """Round each block's value >= 0 to a multiple of six bits of its superblock's unit in fp16."""
    groups = values.split(SUPERBLOCK // BLOCK, dim=-1)
    units = [(group.amax(-1, keepdim=True) / 63).half().float() for group in groups]
    return torch.cat(
        [
            (group / torch.where(unit != 0, unit, 1.0)).round().clamp(0, 63) * unit
            for group, unit in zip(groups, units, strict=True)
        ],
        dim=-1,
    )


def _fit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the offset of each block that leave the least weighed squared error.

    A value weighs its magnitude plus the root of the block's mean square.
    """
    weigh = x.square().mean(-1, keepdim=True).sqrt() + x.abs()
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True)
    spread = (high - low).clamp(min=1e-30)
    best = torch.full_like(low, torch.inf)
    scale, offset = spread / LEVELS, -low
    total, first = weigh.sum(-1, keepdim=True), (weigh * x).sum(-1, keepdim=True)
    for step in range(-1, STEPS):
        levels = LEVELS if step < 0 else LEVELS - 1 + 0.1 * step
        q = ((x - low) * (levels / spread)).round().clamp(0, LEVELS)
        sum_q, sum_qq = ((weigh * each).sum(-1, keepdim=True) for each in (q, q * q))
        sum_xq = (weigh * x * q).sum(-1, keepdim=True)
        divisor = (total * sum_qq - sum_q * sum_q).clamp(min=1e-30)
        own = (total * sum_xq - first * sum_q) / divisor
        least = (sum_qq * first - sum_q * sum_xq) / divisor
        own = torch.where(least > 0, sum_xq / sum_qq.clamp(min=1e-30), own)
        least = least.clamp(max=0)
        error = (weigh * (own * q + least - x).square()).sum(-1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        scale, offset = torch.where(better, own, scale), torch.where(better, -least, offset)
    return scale.squeeze(-1), offset.squeeze(-1)
