"""ModelOpt's NVFP4: two e2m1 values per byte, an e4m3 scale per 16, one fp32 scale per weight."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mtpbuild.builder.quantize.format import Part, Shape

GROUP = 16
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0..7; bit 3 is the sign
LEAST, LARGEST = 2.0**-9, 448.0  # positive e4m3 values


class Nvfp4:
    """W = value * weight_scale * weight_scale_2; the low nibble is the even column."""

    name = "nvfp4"

    def fits(self, shape: Shape) -> bool:
        return shape[1] % GROUP == 0

    def parts(self, shape: Shape) -> dict[str, Part]:
        rows, columns = shape
        return {
            "": Part("U8", (rows, columns // 2)),
            "_scale": Part("F8_E4M3", (rows, columns // GROUP)),
            "_scale_2": Part("F32", ()),
        }

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        values = unpack(parts[""]).unflatten(1, (-1, GROUP))
        scaled = values * parts["_scale"].float()[..., None]  # exact: 2 by 4 bits
        return (scaled * parts["_scale_2"]).flatten(1)

    def encode(self, weight: Tensor, amax: Tensor) -> dict[str, Tensor]:
        second = torch.where(amax > 0, amax / (MAGNITUDES[-1] * LARGEST), 1.0)
        groups = weight.unflatten(1, (-1, GROUP))
        largest = groups.abs().amax(-1)
        scales = (largest / (MAGNITUDES[-1] * second)).clamp(LEAST, LARGEST)
        scales = torch.where(largest > 0, scales, 1.0).to(torch.float8_e4m3fn)
        values = (groups / (scales.float() * second)[..., None]).flatten(1)
        return {"": pack(values), "_scale": scales, "_scale_2": second}


def unpack(packed: Tensor) -> Tensor:
    """uint8 [N, K/2] -> fp32 [N, K]."""
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)])
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1)
    return values[codes.int()].flatten(1)


def pack(values: Tensor) -> Tensor:
    """fp32 [N, K] -> uint8 [N, K/2], each value rounded to the nearest code, ties to the even."""
    steps = torch.tensor(MAGNITUDES)
    middles = (steps[1:] + steps[:-1]) / 2
    size = values.abs()
    codes = torch.bucketize(size, middles)  # a tie goes down, to an even code or an odd one
    codes += torch.isin(size, middles[1::2])
    codes += 8 * values.signbit()
    pairs = codes.to(torch.uint8).unflatten(1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4
