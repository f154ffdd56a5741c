"""Integers in blocks of 32 inputs, and the layout of the CPU's kernels: panels of 32 outputs."""

import torch
from torch import Tensor

BLOCK = 32  # inputs that share a scale
PANEL = 32  # adjacent outputs; the last panel is padded with zeros
VECTOR = 16  # outputs in a line of 64 bytes: four bytes for each output


def dequantise(values: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Convert values [.., blocks, bytes] and scales [.., blocks] to fp32 [.., K].

    A block of 32 bytes holds int8 with zero at 128; a block of 16 bytes holds int4 with zero at 8,
    the low nibble first.
    """
    if bits == 4:
        values = torch.stack([values & 0xF, values >> 4], dim=-1).flatten(-2)
    return ((values.float() - (1 << bits - 1)) * scales.float()[..., None]).flatten(-2)


def bits_of(width: int) -> int:
    """Return the bits per weight for blocks of `width` bytes."""
    return width * 8 // BLOCK


def panels(outputs: int) -> int:
    return -(-outputs // PANEL)


def packed_values(values: Tensor) -> Tensor:
    """Pack uint8 [.., N, K / 32, bytes] into [.., panels, K / 32, 32 * bytes].

    A line of 64 bytes has four inputs of 16 outputs. With 4 bits these are the low nibbles; the
    high nibbles are the next four inputs.
    """
    bits = bits_of(values.shape[-1])
    if bits == 4:  # bytes of inputs (0, 1), (2, 3), .. -> bytes of inputs (0, 4), (1, 5), ..
        inputs = torch.stack([values & 0xF, values >> 4], dim=-1).flatten(-2)
        groups = inputs.unflatten(-1, (4, 2, 4))  # pair of fours, low or high, input
        values = (groups[..., 0, :] | groups[..., 1, :] << 4).flatten(-2)
    filled = _fill(values, values.ndim - 3, 0x80 if bits == 8 else 0x88)
    # .., panel, vector, output, block, line, input -> .., panel, block, line, vector, output, input
    lines = filled.unflatten(-3, (-1, 2, VECTOR)).unflatten(-1, (-1, 4))
    *_, panel, vector, output, block, line, four = range(lines.ndim)
    order = [*range(panel), panel, block, line, vector, output, four]
    return lines.permute(order).flatten(-4).contiguous()


def packed_scales(scales: Tensor) -> Tensor:
    """Pack [.., N, K / 32] into fp16 [.., panels, K / 32, 32]."""
    filled = _fill(scales, scales.ndim - 2, 0)
    return filled.unflatten(-2, (-1, PANEL)).transpose(-1, -2).contiguous()


def packed_floats(weight: Tensor) -> Tensor:
    """Pack fp32 [.., K, N] into [.., panels, K, 32]."""
    filled = _fill(weight, weight.ndim - 1, 0)
    return filled.unflatten(-1, (-1, PANEL)).transpose(-2, -3).contiguous()


def pairs_of_floats(weight: Tensor) -> Tensor:
    """Pad gates and ups [.., K, 2 I] to whole panels, and interleave their panels."""
    gates, ups = (_fill(half, half.ndim - 1, 0) for half in weight.chunk(2, dim=-1))
    panels = (half.unflatten(-1, (-1, PANEL)) for half in (gates, ups))
    return torch.stack([*panels], dim=-2).flatten(-3)


def gates_then_ups(rows: Tensor, axis: int = 1) -> Tensor:
    """Reorder outputs gate, up, gate, .. [.., 2 I, ..] to 32 gates, their ups, the next 32 gates.

    I is a multiple of 32.
    """
    pairs = rows.unflatten(axis, (-1, PANEL, 2)).transpose(axis + 1, axis + 2)
    return pairs.flatten(axis, axis + 2)


def unpacked_values(packed: Tensor, outputs: int) -> Tensor:
    """Undo `packed_values` for a weight with `outputs` outputs."""
    bits = packed.shape[-1] // 128
    lines = packed.unflatten(-1, (-1, 2, VECTOR, 4))
    *_, panel, block, line, vector, output, four = range(lines.ndim)
    order = [*range(panel), panel, vector, output, block, line, four]
    values = lines.permute(order).flatten(-2).flatten(-5, -3).narrow(-3, 0, outputs)
    if bits == 4:
        lines = values.unflatten(-1, (4, 4))
        inputs = torch.stack([lines & 0xF, lines >> 4], dim=-2).flatten(-3).unflatten(-1, (-1, 2))
        values = inputs[..., 0] | inputs[..., 1] << 4
    return values.contiguous()


def unpacked_scales(packed: Tensor, outputs: int) -> Tensor:
    """Undo `packed_scales`."""
    return packed.transpose(-1, -2).flatten(-3, -2).narrow(-2, 0, outputs).contiguous()


def unpacked_floats(packed: Tensor, outputs: int) -> Tensor:
    """Undo `packed_floats`."""
    return packed.transpose(-2, -3).flatten(-2).narrow(-1, 0, outputs).contiguous()


def _fill(rows: Tensor, axis: int, value: int) -> Tensor:
    """Pad the outputs, which are dimension `axis`, to whole panels with `value`."""
    missing = -rows.shape[axis] % PANEL
    if not missing:
        return rows
    shape = [*rows.shape]
    shape[axis] = missing
    return torch.cat([rows, rows.new_full(shape, value)], dim=axis)
