"""mla_queries and mla_values in Triton: each program computes columns of one head's product."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mtpbuild.plugins.definition import bind, empty_results
from mtpbuild.plugins.launch import (
    INPUTS,
    STAGES,
    Launch,
    Launches,
    cdiv,
    choose_columns,
    inputs_of_tile,
    round_up_to_tile,
    run_launches,
)
from mtpbuild.plugins.matmul_scaled.triton import sum_of_parts
from mtpbuild.plugins.mla_heads.op import empty_queries, mla_queries, mla_values
from mtpbuild.plugins.mla_rows.triton import rotated_sum

MAX_ROWS, OPEN_ROWS = 64, 16  # rows per program; OPEN_ROWS if the number of slots is symbolic


@triton.jit
def absorbed_query(
    q, w_uk, cos, sin,
    rows, tokens,
    out,
    PARTS: tl.constexpr, HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
    RANK: tl.constexpr, INTERLEAVED: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (h, j, i) computes column block j of head h's queries for block i of the tokens.

    The programs with the last j compute the rotary values. ROTARY is ROPE rounded up to a power of
    two. Each row of q is the sum of PARTS rows.
    """
    h = tl.program_id(0)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    some = (m < rows)[:, None]
    row = q + m.to(tl.int64)[:, None] * (HEADS * (NOPE + ROPE))
    apart = rows * (HEADS * (NOPE + ROPE))
    dtype: tl.constexpr = out.dtype.element_ty
    at = (m // tokens * HEADS + h) * tokens + m % tokens
    to = out + at.to(tl.int64)[:, None] * (RANK + ROPE)
    if tl.program_id(1) < tl.num_programs(1) - 1:
        n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        total = product_of_head(
            row + h * NOPE, apart, w_uk + h * NOPE * RANK, some, n,
            PARTS, NOPE, RANK, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        tl.store(to + n, total.to(dtype), some & (n < RANK))
    else:
        r = tl.arange(0, ROTARY)[None, :]
        there = some & (r < ROPE)
        pe = row + HEADS * NOPE + h * ROPE
        angles = m.to(tl.int64)[:, None] * (ROPE // 2)
        turned = rotated_sum(
            pe, apart, cos + angles, sin + angles, r, there, PARTS, ROPE, INTERLEAVED, dtype
        )
        tl.store(to + RANK + r, turned.to(dtype), there)


@triton.jit
def value_of_head(
    o, w_uv,
    rows, tokens,
    out,
    HEADS: tl.constexpr, RANK: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (h, j, i) computes column block j of head h's values for block i of the tokens."""
    h = tl.program_id(0)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    some = (m < rows)[:, None]
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    at = (m // tokens * HEADS + h) * tokens + m % tokens
    total = product_of_head(
        o + at.to(tl.int64)[:, None] * RANK, 0, w_uv + h * RANK * VALUE, some, n,
        1, RANK, VALUE, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    to = out + (m.to(tl.int64)[:, None] * HEADS + h) * VALUE
    tl.store(to + n, total.to(out.dtype.element_ty), some & (n < VALUE))


@triton.jit
def product_of_head(
    pointers, apart, weight, some, n,
    PARTS: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply the rows that `pointers` [BLOCK_M, 1] point to by columns n of one head's weight.

    A row is the sum of PARTS rows at a distance of `apart` values.
    """
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, DEPTH, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        row, column = k[:, None], k[None, :]
        dtype: tl.constexpr = weight.dtype.element_ty
        x = sum_of_parts(pointers + column, some & (column < DEPTH), apart, PARTS, dtype)
        w = tl.load(weight + row * WIDTH + n, (row < DEPTH) & (n < WIDTH), 0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    return total


def _choose_tiles(rows: int, weight: Tensor) -> tuple[dict[str, int], int, int]:
    """Return the kernel's constants and the numbers of column and row blocks.

    rows: may be a symbol.
    """
    heads, depth, columns = weight.shape
    block = round_up_to_tile(min(rows, MAX_ROWS)) if isinstance(rows, int) else OPEN_ROWS
    wide = choose_columns(heads, columns)
    narrow = wide < 64 and block == 16 and weight.element_size() == 2
    deep = inputs_of_tile(weight, depth, 2 * INPUTS if narrow else INPUTS)
    constants = {"BLOCK_M": block, "BLOCK_N": wide, "BLOCK_K": deep}
    return constants, cdiv(columns, wide), cdiv(rows, block)


def mla_queries_launches(*operands: Any) -> Launches:
    """Return the launch of mla_queries.

    q: may be the partial sums [splits, B, T, ..] of a product in fp32.
    """
    known = bind(mla_queries, operands)
    q, w_uk, cos = known["q"], known["w_uk"], known["cos"]
    (B, T, _), (H, n, rank), R = q.shape[-3:], w_uk.shape, 2 * cos.shape[-1]
    out = empty_queries(q, w_uk, cos)
    constants, columns, blocks = _choose_tiles(B * T, w_uk)
    known |= {"rows": B * T, "tokens": T, "PARTS": q.shape[0] if q.dim() == 4 else 1, **constants}
    known |= {"HEADS": H, "NOPE": n, "ROPE": R, "RANK": rank, "ROTARY": round_up_to_tile(R)}
    grid = H, columns + 1, blocks
    launch = Launch.by_name(absorbed_query, grid, known, (out,), stages=STAGES)
    return Launches((launch,), out)


def mla_values_launches(o: Tensor, w_uv: Tensor) -> Launches:
    """Return the launch of mla_values."""
    (B, H, T, rank), v = o.shape, w_uv.shape[2]
    out = empty_results(mla_values, {"o": o, "w_uv": w_uv})
    constants, columns, blocks = _choose_tiles(B * T, w_uv)
    constants |= {"HEADS": H, "RANK": rank, "VALUE": v}
    grid = H, columns, blocks
    launch = Launch(value_of_head, grid, (o, w_uv), (B * T, T), (out,), constants, stages=STAGES)
    return Launches((launch,), out)


mla_queries_triton = run_launches(mla_queries, mla_queries_launches, "q", "w_uk")
mla_values_triton = run_launches(mla_values, mla_values_launches, "o", "w_uv")
