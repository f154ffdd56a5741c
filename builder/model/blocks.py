"""Integer weights inside the model: `x @ weight` as with a plain parameter."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mtpbuild.plugins import matmul_nbits
from mtpbuild.plugins.matmul_nbits.op import BLOCK


class Blocks(nn.Module):
    """A weight [in, out] in blocks of 32 inputs; what is in it is stored [out, in / 32]."""

    def __init__(self, inputs: int, outputs: int, bits: int) -> None:
        super().__init__()
        values = torch.empty(outputs, inputs // BLOCK, BLOCK * bits // 8, dtype=torch.uint8)
        scales = torch.empty(outputs, inputs // BLOCK)
        self.values = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return matmul_nbits(x, self.values, self.scales)


def use_blocks(model: nn.Module, bits: Iterable[tuple[str, int]]) -> None:
    """Replace the named parameters [in, out] by blocks of so many bits."""
    for name, width in bits:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        inputs, outputs = module.get_parameter(leaf).shape
        delattr(module, leaf)
        module.add_module(leaf, Blocks(inputs, outputs, width))
