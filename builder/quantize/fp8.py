"""DeepSeek's FP8: e4m3 values with one fp32 multiplier per block of 128 x 128."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mtpbuild.builder.quantize.format import Part, Shape

BLOCK = 128
LARGEST = 448.0  # of e4m3


class Fp8:
    """W[n, k] = value[n, k] * weight_scale_inv[n // 128, k // 128]; edge blocks may be smaller."""

    name = "fp8"

    def fits(self, shape: Shape) -> bool:
        return True

    def parts(self, shape: Shape) -> dict[str, Part]:
        scales = tuple(-(-size // BLOCK) for size in shape)
        return {"": Part("F8_E4M3", shape), "_scale_inv": Part("F32", scales)}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        values = parts[""].float()
        return values.mul_(spread(parts["_scale_inv"], values.shape))

    def encode(self, weight: Tensor, amax: Tensor) -> dict[str, Tensor]:
        rows, columns = (-size % BLOCK for size in weight.shape)
        padded = torch.nn.functional.pad(weight, (0, columns, 0, rows))
        blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        largest = blocks.abs().amax(dim=(1, 3))
        scales = torch.where(largest > 0, largest / LARGEST, 1.0)
        values = (weight / spread(scales, weight.shape)).to(torch.float8_e4m3fn)
        return {"": values, "_scale_inv": scales}


def spread(scales: Tensor, shape: Shape) -> Tensor:
    """One scale per block -> one per value."""
    rows, columns = shape
    wide = scales.repeat_interleave(BLOCK, dim=1)[:, :columns]
    return wide.repeat_interleave(BLOCK, dim=0)[:rows]
