"""int8 and int4 as ONNX Runtime's MatMulNBits reads them: blocks of 32 with an fp32 scale each."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mtpbuild.builder.quantize.format import Part, Shape
from mtpbuild.plugins.matmul_nbits.op import BLOCK, dequantise


class Integers:
    """W = (value - 2 ** (bits - 1)) * weight_scale; in 4 bits the low nibble comes first."""

    def __init__(self, bits: int) -> None:
        self.name, self.bits, self.zero = f"int{bits}", bits, 1 << bits - 1

    def fits(self, shape: Shape) -> bool:
        return shape[1] % BLOCK == 0

    def parts(self, shape: Shape) -> dict[str, Part]:
        rows, blocks = shape[0], shape[1] // BLOCK
        packed = (rows, blocks, BLOCK * self.bits // 8)
        return {"": Part("U8", packed), "_scale": Part("F32", (rows, blocks))}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        return dequantise(parts[""], parts["_scale"])

    def encode(self, weight: Tensor, amax: Tensor) -> dict[str, Tensor]:
        blocks = weight.unflatten(1, (-1, BLOCK))
        extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        # The extreme becomes -zero, the side that has one value more; so scales may be negative.
        scales = torch.where(extreme != 0, extreme / -self.zero, 1.0)
        values = (blocks / scales).round().add(self.zero).clamp(0, 2 * self.zero - 1)
        values = values.to(torch.uint8)
        if self.bits == 4:
            values = values[..., 0::2] | values[..., 1::2] << 4
        return {"": values, "_scale": scales.squeeze(-1)}
