"""Integers in blocks of 32 inputs, and the layout of the CPU's kernels: panels of 32 outputs."""

import torch
from torch import Tensor

BLOCK = 32  # inputs that share a scale
PANEL = 32  # adjacent outputs; the last panel is padded with zeros
VECTOR = 16  # outputs in a line of 64 bytes: four bytes for each output
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # numbers of codes 0..7; bit 3 is the sign


def dequantise(values: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Convert values [.., blocks, bytes] and scales to fp32 [.., K].

    A block of 32 bytes holds int8 with zero at 128; a block of 16 bytes holds int4 with zero at 8,
    the low nibble first. scales: fp16 [.., blocks], or with zeros or minima as `with_offsets` joins
    them. A minimum is what the lowest code stands for. Scales uint8 [.., blocks, 1] are exponents
    of powers of two, and the values are codes of e2m1.
    """
    if bits == 4:
        values = torch.stack([values & 0xF, values >> 4], dim=-1).flatten(-2)
    if are_powers(scales):
        numbers = values.new_tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float32)
        return (numbers[values.int()] * raise_two(scales)).flatten(-2)
    factors, offsets = split_offsets(scales)
    factors = factors.float()[..., None]
    shifted = values.float()
    if offsets is None:
        shifted -= 1 << bits - 1
    elif offsets.dtype == torch.int8:
        shifted -= offsets.float()[..., None] + (1 << bits - 1)
    else:
        return (shifted * factors + offsets.float()[..., None]).flatten(-2)
    return (shifted * factors).flatten(-2)


def are_powers(scales: Tensor) -> bool:
    return scales.dtype == torch.uint8 and scales.shape[-1] == 1


def raise_two(exponents: Tensor) -> Tensor:
    """Return 2 ** (e - 127) of uint8 exponents, in fp32; 255 becomes infinite."""
    whole = exponents.int()
    bits = torch.where(whole > 0, whole << 23, 1 << 22)  # 2 ** -127 is subnormal
    return bits.int().view(torch.float32)


def multiply_scales(scales: Tensor, factors: Tensor) -> Tensor:
    """Multiply the scales of each row, and minima, by a power of two."""
    if are_powers(scales):
        exponents = scales.int() + factors.log2().int()[:, None, None]
        return exponents.clamp(0, 254).byte()
    halves, offsets = split_offsets(scales)
    halves = (halves.float() * factors[:, None]).half()
    if offsets is None:
        return halves
    if offsets.dtype == torch.float16:  # minima
        offsets = (offsets.float() * factors[:, None]).half()
    return with_offsets(halves, offsets)


def with_offsets(scales: Tensor, offsets: Tensor) -> Tensor:
    """Join fp16 scales [.., blocks] and int8 zeros, or fp16 minima, to uint8 [.., blocks, 3 or 4].

    A zero is subtracted from the values of its block, besides the 8 or 128.
    """
    both = (part.contiguous()[..., None].view(torch.uint8) for part in (scales, offsets))
    return torch.cat([*both], dim=-1)


def split_offsets(scales: Tensor) -> tuple[Tensor, Tensor | None]:
    """Undo `with_offsets`; scales without offsets stay as they are."""
    if scales.dtype != torch.uint8:
        return scales, None
    kind = torch.int8 if scales.shape[-1] == 3 else torch.float16
    halves = _viewed(scales[..., :2], torch.float16)[..., 0]
    return halves, _viewed(scales[..., 2:], kind)[..., 0]


def bits_of(width: int) -> int:
    """Return the bits per weight for blocks of `width` bytes."""
    return width * 8 // BLOCK


def count_panels(outputs: int) -> int:
    return -(-outputs // PANEL)


def pack_values(values: Tensor) -> Tensor:
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


def pack_scales(scales: Tensor) -> Tensor:
    """Pack [.., N, K / 32] into fp16 [.., panels, K / 32, 32].

    Zeros or minima come after their block's scales, so that a block has 48 or 64 halves. Exponents
    of powers of two are bytes, so that it has 16.
    """
    if are_powers(scales):
        return _viewed(pack_scales(scales[..., 0].view(torch.int8)), torch.float16)
    factors, offsets = split_offsets(scales)
    filled = _fill(factors, factors.ndim - 2, 0)
    packed = filled.unflatten(-2, (-1, PANEL)).transpose(-1, -2).contiguous()
    if offsets is None:
        return packed
    return torch.cat([packed, _viewed(pack_scales(offsets), torch.float16)], dim=-1)


def pack_floats(weight: Tensor) -> Tensor:
    """Pack fp32 [.., K, N] into [.., panels, K, 32]."""
    filled = _fill(weight, weight.ndim - 1, 0)
    return filled.unflatten(-1, (-1, PANEL)).transpose(-2, -3).contiguous()


def pack_pairs(weight: Tensor) -> Tensor:
    """Pad gates and ups [.., K, 2 I] to whole panels, and interleave their panels."""
    gates, ups = (_fill(half, half.ndim - 1, 0) for half in weight.chunk(2, dim=-1))
    panels = (half.unflatten(-1, (-1, PANEL)) for half in (gates, ups))
    return torch.stack([*panels], dim=-2).flatten(-3)


def reorder_gates(rows: Tensor) -> Tensor:
    """Reorder outputs gate, up, gate, .. [X, 2 I, ..] to 32 gates, their ups, the next 32 gates.

    I is a multiple of 32.
    """
    return rows.unflatten(1, (-1, PANEL, 2)).transpose(2, 3).flatten(1, 3)


def unpack_values(packed: Tensor, outputs: int) -> Tensor:
    """Undo `pack_values` for a weight with `outputs` outputs."""
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


def unpack_scales(packed: Tensor, outputs: int) -> Tensor:
    """Undo `pack_scales`."""
    if packed.shape[-1] == PANEL // 2:
        exponents = unpack_scales(_viewed(packed, torch.int8), outputs)
        return exponents.view(torch.uint8)[..., None]
    if packed.shape[-1] > PANEL:
        kind = torch.float16 if packed.shape[-1] == 2 * PANEL else torch.int8
        offsets = _viewed(packed[..., PANEL:], kind)
        return with_offsets(
            unpack_scales(packed[..., :PANEL], outputs), unpack_scales(offsets, outputs)
        )
    return packed.transpose(-1, -2).flatten(-3, -2).narrow(-2, 0, outputs).contiguous()


def unpack_floats(packed: Tensor, outputs: int) -> Tensor:
    """Undo `pack_floats`."""
    return packed.transpose(-2, -3).flatten(-2).narrow(-1, 0, outputs).contiguous()


def _viewed(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy's bytes as another type; `contiguous` leaves the strides of axes of size 1."""
    return part.clone(memory_format=torch.contiguous_format).view(dtype)


def _fill(rows: Tensor, axis: int, value: int) -> Tensor:
    """Pad the outputs, which are dimension `axis`, to whole panels with `value`."""
    missing = -rows.shape[axis] % PANEL
    if not missing:
        return rows
    shape = [*rows.shape]
    shape[axis] = missing
    return torch.cat([rows, rows.new_full(shape, value)], dim=axis)
