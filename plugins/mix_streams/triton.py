"""balance_streams in Triton: one program per token, whose rounds stay in registers."""

from math import prod
from typing import Any

import triton
import triton.language as tl

from mtpbuild.plugins.definition import bind, empty_results
from mtpbuild.plugins.launch import Launch, Launches, round_up_to_tile, run_launches
from mtpbuild.plugins.matmul_scaled.triton import sum_of_parts
from mtpbuild.plugins.mix_streams.op import balance_streams


@triton.jit
def balance(
    numbers, base, scale,
    tokens,
    pre, weights,
    PARTS: tl.constexpr, STREAMS: tl.constexpr, ITERATIONS: tl.constexpr, EPS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Program n weighs the streams of token n; its numbers are the sum of PARTS rows.

    WIDE is STREAMS rounded up to a power of two.
    """
    size: tl.constexpr = STREAMS * (STREAMS + 2)
    n = tl.program_id(0).to(tl.int64)
    at, apart = numbers + n * size, tokens * size
    k, i, j = tl.arange(0, WIDE), tl.arange(0, WIDE)[:, None], tl.arange(0, WIDE)[None, :]
    here, there = k < STREAMS, (i < STREAMS) & (j < STREAMS)
    x = sum_of_parts(at + k, here, apart, PARTS, tl.float32) * tl.load(scale)
    x += tl.load(base + k, here, 0.0)
    tl.store(pre + n * STREAMS + k, tl.sigmoid(x) + EPS, here)
    x = sum_of_parts(at + STREAMS + k, here, apart, PARTS, tl.float32) * tl.load(scale + 1)
    x += tl.load(base + STREAMS + k, here, 0.0)
    to = weights + n * (STREAMS * (STREAMS + 1))
    tl.store(to + k, 2 * tl.sigmoid(x), here)
    place = i * STREAMS + j
    x = sum_of_parts(at + 2 * STREAMS + place, there, apart, PARTS, tl.float32)
    x = x * tl.load(scale + 2) + tl.load(base + 2 * STREAMS + place, there, 0.0)
    x = tl.exp(x - tl.max(tl.where(there, x, float("-inf")), 1)[:, None])
    x = tl.where(there, x, 0.0)
    x = tl.where(there, x / tl.sum(x, 1)[:, None] + EPS, 0.0)
    x = x / (tl.sum(x, 0)[None, :] + EPS)
    for _ in range(ITERATIONS - 1):
        x = x / (tl.sum(x, 1)[:, None] + EPS)
        x = x / (tl.sum(x, 0)[None, :] + EPS)
    tl.store(to + STREAMS + place, x, there)


def balance_streams_launches(*operands: Any) -> Launches:
    """Return the op's launch; numbers may be the partial sums [splits, B, T, ..] of a product."""
    known = bind(balance_streams, operands)
    numbers, parts = known["numbers"], 1
    if numbers.dim() == 4:
        parts, known["numbers"] = numbers.shape[0], numbers[0]
    tokens = prod(known["numbers"].shape[:-1])
    results = empty_results(balance_streams, known)
    known |= {"numbers": numbers, "tokens": tokens, "PARTS": parts}
    known["WIDE"] = round_up_to_tile(known["streams"], 2)
    launch = Launch.by_name(balance, (tokens,), known, results, warps=1)
    return Launches((launch,), results)


balance_streams_triton = run_launches(balance_streams, balance_streams_launches, "numbers")
