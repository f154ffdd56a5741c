"""mla_rows in Triton: two programs per token, one for its queries and one for its cache row."""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from mtpbuild.plugins.definition import bind
from mtpbuild.plugins.launch import Launch, Launches, by_kernels, round_up_to_tile, run_launches
from mtpbuild.plugins.matmul_scaled.triton import sum_of_parts
from mtpbuild.plugins.mla_rows.op import empty_rows, mla_rows, mla_rows_write


@triton.jit
def latent_row(
    a, q_norm, kv_norm, cos, sin, start, cache,
    tokens, capacity,
    q, fresh,
    PARTS: tl.constexpr, QUERY: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    EPS: tl.constexpr, INTERLEAVED: tl.constexpr, WIDE: tl.constexpr, LATENT: tl.constexpr,
    ROTARY: tl.constexpr,
):  # fmt: skip
    """Program (n, 0) normalises the query part of token n, program (n, 1) computes its cache row.

    n counts the tokens of all slots. Each row of `a` is the sum of PARTS rows. If there is a cache,
    the row is written to it, too. WIDE, LATENT and ROTARY are QUERY, RANK and ROPE rounded up to
    powers of two.
    """
    n = tl.program_id(0).to(tl.int64)
    row = a + n * (QUERY + RANK + ROPE)
    apart = tl.num_programs(0) * (QUERY + RANK + ROPE)
    dtype: tl.constexpr = fresh.dtype.element_ty
    if tl.program_id(1) == 0:
        w = tl.arange(0, WIDE)
        query = sum_of_parts(row + w, w < QUERY, apart, PARTS, dtype)
        if q_norm is not None:
            query = normed(query, tl.load(q_norm + w, w < QUERY, 0.0), QUERY, EPS)
        tl.store(q + n * QUERY + w, query.to(dtype), w < QUERY)
    else:
        c, r = tl.arange(0, LATENT), tl.arange(0, ROTARY)
        x = sum_of_parts(row + QUERY + c, c < RANK, apart, PARTS, dtype)
        x = normed(x, tl.load(kv_norm + c, c < RANK, 0.0), RANK, EPS).to(dtype)
        key = row + QUERY + RANK
        angles = n * (ROPE // 2)
        turned = rotated_sum(
            key, apart, cos + angles, sin + angles, r, r < ROPE, PARTS, ROPE, INTERLEAVED, dtype
        ).to(dtype)
        to = fresh + n * (RANK + ROPE)
        tl.store(to + c, x, c < RANK)
        tl.store(to + RANK + r, turned, r < ROPE)
        if cache is not None:
            b = n // tokens
            to = cache + (b * capacity + tl.load(start + b) + n % tokens) * (RANK + ROPE)
            tl.store(to + c, x, c < RANK)
            tl.store(to + RANK + r, turned, r < ROPE)


@triton.jit
def normed(x, weight, SIZE: tl.constexpr, EPS: tl.constexpr):
    """Apply an RMSNorm to a row, in fp32; values after the row's end must be 0."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + EPS) * weight.to(tl.float32)


@triton.jit
def rotated_sum(
    of, apart, cos, sin, r, there,
    PARTS: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Load values r of rotary rows, each of which is the sum of PARTS rows, and rotate them."""
    pair, other, sign = partner_of(r, ROPE, INTERLEAVED)
    value = sum_of_parts(of + r, there, apart, PARTS, dtype)
    partner = sum_of_parts(of + other, there, apart, PARTS, dtype)
    turned = value * tl.load(cos + pair, there, 0.0)
    return turned + sign * partner * tl.load(sin + pair, there, 0.0)


@triton.jit
def partner_of(r, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the pair of rotary value r, its partner, and the sign of the partner's term."""
    if INTERLEAVED:
        pair, first = r // 2, r % 2 == 0
        other = tl.where(first, r + 1, r - 1)
    else:
        pair, first = r % (ROPE // 2), r < ROPE // 2
        other = tl.where(first, r + ROPE // 2, r - ROPE // 2)
    return pair, other, tl.where(first, -1.0, 1.0)


def rows_launch(op: CustomOpDef, operands: Sequence[Any]) -> Launch:
    """Return the launch of `mla_rows`; the kernel also writes the rows into a cache, if given.

    The first operand may be the partial sums [splits, B, T, ..] of a product in fp32.
    """
    known = {"cache": None, "start": None} | bind(op, operands)
    a, kv_norm, cos, cache = (known[name] for name in ("a", "kv_norm", "cos", "cache"))
    q, fresh = empty_rows(a, kv_norm, cos)
    (B, T, Q), rank, R = q.shape, kv_norm.shape[0], 2 * cos.shape[-1]
    known |= {"tokens": T, "capacity": 0 if cache is None else cache.shape[2]}
    known |= {"QUERY": Q, "RANK": rank, "ROPE": R, "PARTS": a.shape[0] if a.dim() == 4 else 1}
    known |= {
        "WIDE": round_up_to_tile(Q),
        "LATENT": round_up_to_tile(rank),
        "ROTARY": round_up_to_tile(R),
    }
    return Launch.by_name(latent_row, (B * T, 2), known, (q, fresh))


def mla_rows_launches(*operands: Any) -> Launches:
    """Return the launch of mla_rows."""
    launch = rows_launch(mla_rows, operands)
    return Launches((launch,), launch.outputs)


mla_rows_triton = run_launches(mla_rows, mla_rows_launches, "a")


@by_kernels(mla_rows_write, "mla_rows_into", writes=("cache",), returns=tuple[Tensor, Tensor])
def mla_rows_into(a: Tensor, *operands: Any) -> tuple[Tensor, ...]:
    """Run mla_rows_write on a GPU in place; return only the query input and the rows."""
    return rows_launch(mla_rows_write, (a.contiguous(), *operands)).run()


@by_kernels(mla_rows_write)
def mla_rows_write_triton(*operands: Any) -> tuple[Tensor, ...]:
    """Run mla_rows_write on a GPU, on a copy of the cache; `mla_rows_into` works in place."""
    known = bind(mla_rows_write, operands)
    known["cache"] = known["cache"].clone()
    q, fresh = mla_rows_into(*known.values())
    return q, fresh, known["cache"]
