"""Instructions of all 32 threads of a warp; arrays are [.., 32], over the warps of a grid."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
LANES = np.arange(32)
GROUP, TURN = LANES // 4, LANES % 4  # the row and the column of a thread in a fragment


def shuffled(how: str, values: Array, by: Array, clamp: int) -> tuple[Array, Array]:
    """Return the values of other lanes, and whether there is such a lane."""
    assert clamp in ((0,) if how == "up" else (31,)), "segments of a warp are not known"
    lane = {"bfly": LANES ^ by, "idx": by & 31, "up": LANES - by, "down": LANES + by}[how]
    there = (lane >= 0) & (lane < 32)
    found = np.take_along_axis(values, np.where(there, lane, LANES), axis=-1)
    return found, np.broadcast_to(there, found.shape)


def matrices_of_rows(rows: Array, transposed: bool) -> list[Array]:
    """Compute ldmatrix: n registers [.., 32] of two values each from 16-bit rows [.., 8 n, 8]."""
    matrices = rows.reshape(*rows.shape[:-2], -1, 8, 8)
    if transposed:
        matrices = matrices.swapaxes(-1, -2)
    low, high = (matrices[..., GROUP, 2 * TURN + i].astype(np.uint32) for i in range(2))
    whole = low | high << np.uint32(16)
    return [whole[..., i, :] for i in range(whole.shape[-2])]


def rows_of_matrices(registers: Sequence[Array], transposed: bool) -> Array:
    """Compute stmatrix: rows [.., 8 n, 8] of 16 bits from n registers [.., 32]."""
    shape = *registers[0].shape[:-1], len(registers), 8, 8
    matrices = np.zeros(shape, np.uint16)
    for i, register in enumerate(registers):
        for half in range(2):
            values = (register >> np.uint32(16 * half) & np.uint32(0xFFFF)).astype(np.uint16)
            matrices[..., i, GROUP, 2 * TURN + half] = values
    if transposed:
        matrices = matrices.swapaxes(-1, -2)
    return matrices.reshape(*shape[:-3], -1, 8)


def product(kind: str, a: Sequence[Array], b: Sequence[Array], c: Sequence[Array]) -> list[Array]:
    """Compute mma.m16n8k16 of 16 bits or m16n8k8 of tf32: fp32 sums [.., 32] of fragments."""
    shape, wide = a[0].shape[:-1], 8 if kind == "tf32" else 16
    left, right = np.zeros((*shape, 16, wide), np.float32), np.zeros((*shape, wide, 8), np.float32)
    for i, register in enumerate(a):
        row, column = GROUP + 8 * (i % 2), i // 2
        for j, values in enumerate(_values(kind, register)):
            left[..., row, _inner(kind, column, j)] = values
    for i, register in enumerate(b):
        for j, values in enumerate(_values(kind, register)):
            right[..., _inner(kind, i, j), GROUP] = values
    sums = left @ right
    places = [(GROUP + 8 * (i // 2), 2 * TURN + i % 2) for i in range(4)]
    return [c[i] + sums[..., row, column] for i, (row, column) in enumerate(places)]


def _inner(kind: str, register: int, value: int) -> Array:
    return TURN + 4 * register if kind == "tf32" else 2 * TURN + 8 * register + value


def _values(kind: str, register: Array) -> list[Array]:
    if kind == "tf32":
        return [(register & np.uint32(0xFFFFE000)).view(np.float32)]
    of = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}[kind]
    parts = ((register >> np.uint32(by) & np.uint32(0xFFFF)).astype(np.uint16) for by in (0, 16))
    return [part.view(of).astype(np.float32) for part in parts]
