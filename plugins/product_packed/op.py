"""product_packed: x @ W for a weight in the layout of the CPU's kernels."""

import torch
from torch import Tensor

from mtpbuild.plugins.cpu import layout
from mtpbuild.plugins.definition import Node, define


@define(lambda x, outputs: x.new_empty(*x.shape[:-1], outputs), Node("Product", {"outputs": "N"}))
def product_packed(
    x: Tensor, values: Tensor, scales: Tensor | None, outputs: int, groups: int = 1
) -> Tensor:
    """Multiply x [.., K] by a weight with `outputs` outputs -> fp32 [.., outputs].

    The weight is packed by `plugins/cpu/layout.py`: values uint8 [panels, K / 32, 128 * bits] with
    scales fp16 [panels, K / 32, 32], for which the kernels round x to int8 per row and block; a
    block's zeros or minima come after its scales, so that it has 48 or 64 halves; the
    last panels of int4 may be int8, each in the place of two; or
    values fp32 [panels, K, 32] without scales, or [H, panels, K, 32] for x [B, H, T, K].

    groups: each of x's groups [.., groups K] is multiplied by its own group of outputs.
    """
    weight = unpacked(values, scales, outputs)
    return x @ weight.mT if groups == 1 else multiply_groups(x, weight.mT, groups)


def multiply_groups(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Multiply each group of x [.., groups K] by its own columns of a weight [K, N] -> [.., N]."""
    columns = weight.unflatten(-1, (groups, -1)).transpose(0, 1)  # [groups, K, N / groups]
    apart = x.unflatten(-1, (groups, -1)).flatten(0, -3).transpose(0, 1)  # [groups, tokens, K]
    return (apart @ columns).transpose(0, 1).reshape(*x.shape[:-1], -1)


def unpacked(values: Tensor, scales: Tensor | None, outputs: int) -> Tensor:
    """Unpack weights [.., panels, ..] to fp32 [.., outputs, K]."""
    if scales is None:
        return layout.unpack_floats(values, outputs).mT
    count, eights = scales.shape[-3], values.shape[-3] - scales.shape[-3]
    if eights:
        fours = count - eights
        wide = values[fours:].reshape(eights, -1, 2 * values.shape[-1])
        first = unpacked(values[:fours], scales[:fours], fours * layout.PANEL)
        return torch.cat([first, unpacked(wide, scales[fours:], outputs - len(first))])
    integers = layout.unpack_values(values, outputs)
    factors = layout.unpack_scales(scales, outputs)
    return layout.dequantise(integers, factors, values.shape[-1] // 128)
