"""Rotary position embedding, scaled as YaRN or Llama 3 do: frequencies, tables, softmax scale."""

import math

import torch
from torch import Tensor

from mtpbuild.builder.checkpoint.config import RopeConfig


def compute_inverse_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """Return the angle of each pair per position, [dim / 2] fp32 (YaRN: arXiv:2309.00071)."""
    base = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.kind == "default":
        return base
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "proportional":  # only the first pairs turn
        turning = int(rope.partial_rotary_factor * dim / 2)
        return torch.where(torch.arange(dim // 2) < turning, base / rope.factor, 0.0)
    if rope.kind == "llama3":
        return scale_as_llama3(rope, base)

    def correction_dim(rotations: float) -> float:
        span = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(span) / (2 * math.log(rope.theta))

    low = correction_dim(rope.beta_fast)
    high = correction_dim(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)


def scale_as_llama3(rope: RopeConfig, base: Tensor) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and pass from one to the other."""
    turns = rope.original_max_position_embeddings * base / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    share = ((turns - low) / (high - low)).clamp(0, 1)  # of the frequency as it is
    return (1 - share) * base / rope.factor + share * base


def _compute_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def compute_table_scale(rope: RopeConfig) -> float:
    """Return the factor of cos and sin; 1.0 for DeepSeek's own checkpoints."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _compute_mscale(rope.factor, rope.mscale) / _compute_mscale(
            rope.factor, rope.mscale_all_dim
        )
    return _compute_mscale(rope.factor, 1.0)


def softmax_scale(rope: RopeConfig, head_dim: int) -> float:
    """Return the scale of attention scores: from a head's width, never from a latent's."""
    scale = 1 / math.sqrt(head_dim)
    if rope.kind != "default" and rope.mscale_all_dim:
        scale *= _compute_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale


def compute_rope_tables(rope: RopeConfig, dim: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin for positions 0..rows-1, each [rows, dim / 2] fp32."""
    angles = torch.arange(rows, dtype=torch.float32)[:, None] * compute_inverse_frequencies(
        rope, dim
    )
    scale = compute_table_scale(rope)
    return angles.cos() * scale, angles.sin() * scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleave: bool) -> Tensor:
    """Rotate the pairs of x [..., R]; the result has all first values, then all second ones.

    With `interleave` the pairs of x are neighbours, as DeepSeek's checkpoints store them. The
    results for queries and keys are both in the layout of halves, so their products are unchanged.
    """
    if interleave:
        a, b = x[..., 0::2], x[..., 1::2]
    else:
        a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
