"""The arithmetic of the CPU's kernels in NumPy, to the bit: what plugins/cpu/source promises."""

from collections.abc import Iterable
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
F = np.float32
LOWEST, FLOOR = F(-3.0e38), F(-73.682724)
CHUNK, SPLIT = 64, 512


def fma(a: Any, b: Any, c: Any) -> Floats:
    """Multiply and add with one rounding, for results that are no subnormal numbers.

    A product of two fp32 numbers is exact in fp64, their sum is not: where it lies in the middle
    between two fp32 numbers, what was rounded away decides.
    """
    product, term = np.float64(a) * np.float64(b), np.float64(c)
    total = np.asarray(product + term)
    other = total - product
    lost = (product - (total - other)) + (term - other)
    middle = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    towards = np.where(lost > 0, np.inf, -np.inf)
    nudged = np.where(middle & (lost != 0), np.nextafter(total, towards), total)
    return nudged.astype(F)


def quantise(x: Floats, most: int = 127) -> tuple[NDArray[np.int32], Floats]:
    """Round rows [.., K] to integers in blocks of 32: values [.., K / 32, 32] and scales."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    top = np.abs(blocks).max(-1)
    usable = top > F(1e-30)
    inverse = np.where(usable, F(most) / np.where(usable, top, F(1)), F(0)).astype(F)
    values = np.rint(blocks * inverse[..., None]).astype(np.int32)
    return values, np.where(usable, top / F(most), F(0)).astype(F)


def product(
    x: Floats,
    w: NDArray[Any],
    scales: NDArray[Any],
    minima: NDArray[np.float16] | None = None,
) -> Floats:
    """x [M, K] times an integer weight [N, K / 32, 32] without its zero point -> [M, N]."""
    values, factors = quantise(x)
    total = np.zeros((len(x), len(w)), F)
    for b in range(w.shape[1]):
        sums = (values[:, b] @ w[:, b].T).astype(F)
        total = fma(sums, scales[None, :, b].astype(F) * factors[:, b, None], total)
        if minima is not None:
            inputs = values[:, b].sum(-1, keepdims=True).astype(F)
            total = fma(minima[None, :, b].astype(F), inputs * factors[:, b, None], total)
    return total


def float_product(x: Floats, w: Floats) -> Floats:
    """x [.., M, K] times [.., K, N]."""
    total = np.zeros((*x.shape[:-1], w.shape[-1]), F)
    for k in range(x.shape[-1]):
        total = fma(x[..., k, None], w[..., k, None, :], total)
    return total


def exp(x: Floats) -> Floats:
    x = np.clip(x, F(-87), F(88))
    n = np.rint(x * F(1.44269504))
    r = fma(n, F(2.12194440e-4), fma(n, F(-0.693359375), x))
    p = np.full_like(r, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, F(c))
    p = fma(p, r * r, r + F(1))
    return np.ldexp(p, n.astype(np.int32)).astype(F)


def gated(gate: Floats, up: Floats) -> Floats:
    return gate / (F(1) + exp(F(0) - gate)) * up


def norm(x: Floats, weight: Floats, epsilon: float) -> Floats:
    """Norm rows [M, N]."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % 16)))
    lanes = np.zeros((len(x), 16), F)
    for i in range(0, padded.shape[1], 16):
        lanes = fma(padded[:, i : i + 16], padded[:, i : i + 16], lanes)
    mean = _tree(lanes)[:, None] / F(x.shape[1])
    return x * (F(1) / np.sqrt(mean + F(epsilon))) * weight


Partial = tuple[Floats, Floats, Floats]


def attention(q: Floats, rows: Floats, scale: float, latent: int) -> Floats:
    """Attend with a token's queries [H, C] to all rows [n, C] -> [H, latent]."""
    q = q * F(scale)
    return fold_parts(attend_partly(q, part, latent) for part in _splits(rows))


def _splits(rows: Any) -> list[Any]:
    return [rows[at : at + SPLIT] for at in range(0, len(rows), SPLIT)]


def fold_parts(parts: Iterable[Partial]) -> Floats:
    _, total, mixed = reduce(_fold, parts)
    return mixed * (F(1) / total)[:, None]


Blocks = list[tuple[int, int, int]]  # of an int8 row: first value, number of values, their scale


def integer_attention(
    q: Floats, rows: NDArray[np.int8], scale: float, keys: Blocks, values: Blocks
) -> Floats:
    """Attend with a token's queries [H, C] to all int8 rows [n, bytes]."""
    wide = np.zeros((len(q), len(keys), 32), F)
    at = 0
    for b, (_, count, _) in enumerate(keys):
        wide[:, b, :count] = q[:, at : at + count] * F(scale)
        at += count
    rounded = quantise(wide.reshape(len(q), -1), 64)
    return fold_parts(_integer_split(*rounded, part, keys, values) for part in _splits(rows))


def _block(rows: NDArray[np.int8], block: tuple[int, int, int]) -> tuple[Any, Floats]:
    """Return a block's values and scales of rows that are padded with zeros."""
    first, count, scale = block
    factors = np.ascontiguousarray(rows[:, scale : scale + 2]).view(np.float16)[:, 0].astype(F)
    return rows[:, first : first + count].astype(np.int32), factors


def _integer_split(
    q: NDArray[np.int32], q_scales: Floats, rows: NDArray[np.int8], keys: Blocks, values: Blocks
) -> Partial:
    scores, padding = np.zeros((len(q), len(rows)), F), -len(rows) % 32
    for b, block in enumerate(keys):
        ints, factors = _block(rows, block)
        sums = (q[:, b, : ints.shape[1]] @ ints.T).astype(F)
        scores = fma(sums, factors[None] * q_scales[:, b, None], scores)
    top = scores.max(1)
    weights = np.pad(exp(np.maximum(scores - top[:, None], FLOOR)), ((0, 0), (0, padding)))
    blocks = weights.reshape(len(q), -1, 32)
    lanes = np.zeros((len(q), 16), F)
    for i in range(0, weights.shape[1], 16):
        lanes = lanes + weights[:, i : i + 16]
    most = blocks.max(2)
    scaled = blocks * (F(127) / most)[..., None]
    mixed = []
    for block in values:
        ints, factors = (
            np.pad(x, ((0, padding), *[(0, 0)] * (x.ndim - 1))) for x in _block(rows, block)
        )
        tops = factors.reshape(-1, 32).max(1)
        inverse = np.divide(F(1), tops, out=np.zeros_like(tops), where=tops > 0)
        shares = np.rint(scaled * (factors.reshape(-1, 32) * inverse[:, None])).astype(np.int32)
        total = np.zeros((len(q), ints.shape[1]), F)
        for b in range(len(tops)):
            sums = (shares[:, b] @ ints[32 * b : 32 * b + 32]).astype(F)
            total = fma(sums, (most[:, b] / F(127) * tops[b])[:, None], total)
        mixed.append(total)
    return top, _tree(lanes), np.concatenate(mixed, axis=1)


def _tree(lanes: Floats) -> Floats:
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def attend_partly(q: Floats, rows: Floats, latent: int, first: int = 0) -> Partial:
    """Return the partial softmax of scaled queries over rows, which begin at position `first`."""
    H = len(q)
    largest, total = np.full(H, LOWEST), np.zeros(H, F)
    mixed = np.zeros((H, latent), F)
    for at in range(first // CHUNK * CHUNK, first + len(rows), CHUNK):
        chunk = rows[max(0, at - first) : at + CHUNK - first]
        scores = float_product(q, np.ascontiguousarray(chunk.T))
        top = np.maximum(largest, scores.max(1))
        weights = exp(np.maximum(scores - top[:, None], FLOOR))
        factor = exp(np.maximum(largest - top, FLOOR))
        added = np.zeros(H, F)
        for r in range(len(chunk)):
            added = added + weights[:, r]
        total, largest = fma(total, factor, added), top
        mixed = mixed * factor[:, None]
        for r in range(len(chunk)):
            mixed = fma(weights[:, r, None], chunk[r, :latent], mixed)
    return largest, total, mixed


def _fold(one: Partial, other: Partial) -> Partial:
    top = np.maximum(one[0], other[0])
    keep, take = (exp(np.maximum(part[0] - top, FLOOR)) for part in (one, other))
    mixed = fma(other[2], take[:, None], one[2] * keep[:, None])
    return top, fma(other[1], take, one[1] * keep), mixed
