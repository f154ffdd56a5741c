"""choose_rows in Triton: scores of all rows as integers, then each token's best, without a sort.

The integers have the order of the scores, with NaN below all others. A token that sees no more rows
than it may choose is not scored, so a short context costs two launches that do almost nothing.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mtpbuild.plugins.definition import bind
from mtpbuild.plugins.launch import Launch, Launches, cdiv, round_up_to_tile, run_launches
from mtpbuild.plugins.mla_rows.triton import partner_of
from mtpbuild.plugins.sparse_rows.op import choose_rows

LEAST = tl.constexpr(-(1 << 31))  # stands for NaN
OPEN_BLOCK = 2048  # positions that a program reads together, if the capacity is symbolic


@triton.jit
def score_rows(
    q, weights, cos, sin, cache, fresh, base, first,
    tokens, capacity, fresh_rows,
    scores,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr,
    KEY: tl.constexpr, RATIO: tl.constexpr, INTERLEAVED: tl.constexpr, COUNT: tl.constexpr,
    DEEP: tl.constexpr, CHUNK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (n, i) scores block i of the rows for token n of all slots, at their positions.

    The cache's blocks come first, then those of the fresh rows. A row's key is its SIZE values from
    KEY on. RATIO: tokens that make a row, if there are no fresh rows; else 0. BLOCK_H heads of the
    query are rotated and multiplied at a time, CHUNK values of each; DEEP is SIZE rounded up to a
    power of two. The order of sums is the same for every row and token, so that a score depends
    only on its row and token.
    """
    n, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, t = n // tokens, (n % tokens).to(tl.int32)
    held, later = tl.load(base + b).to(tl.int32), tl.load(first + b).to(tl.int32) + t + 1
    committed, seen = rows_seen(held, later, capacity, fresh_rows, RATIO)
    begin, end, place = block * BLOCK_N, committed, 0
    rows = cache + b * capacity * WIDTH
    if block >= tl.cdiv(capacity, BLOCK_N):
        begin = (block - tl.cdiv(capacity, BLOCK_N)) * BLOCK_N
        end, place = seen - committed, committed
        rows = fresh + b * fresh_rows * WIDTH
    if (seen > COUNT) & (begin < end):
        j, d = begin + tl.arange(0, BLOCK_N), tl.arange(0, CHUNK)
        key, there = rows + j.to(tl.int64)[:, None] * WIDTH + KEY, (j < end)[:, None]
        if CHUNK == DEEP:
            keys = tl.load(key + d[None, :], there & (d < SIZE)[None, :], 0.0)
        score = tl.zeros((BLOCK_N,), tl.float32)
        for begin_h in tl.range(0, HEADS, BLOCK_H, num_stages=1):
            h = begin_h + tl.arange(0, BLOCK_H)
            sums = tl.zeros((BLOCK_H, BLOCK_N), tl.float32)
            for c in tl.static_range(0, DEEP, CHUNK):
                query = rotated(
                    q + n * (HEADS * SIZE), cos + n * (ROPE // 2), sin + n * (ROPE // 2), h, c + d,
                    HEADS, SIZE, ROPE, INTERLEAVED,
                )  # fmt: skip
                if CHUNK < DEEP:
                    keys = tl.load(key + c + d[None, :], there & (c + d < SIZE)[None, :], 0.0)
                sums = tl.dot(query, tl.trans(keys), sums, input_precision=PRECISION)
            share = tl.load(weights + n * HEADS + h, h < HEADS, 0.0) * (HEADS**-0.5)
            score += tl.sum(share[:, None] * tl.where(sums < 0, 0.0, sums * (SIZE**-0.5)), 0)
        to = scores + n * (capacity + fresh_rows) + place + j
        tl.store(to, ordered(score), j < end)


@triton.jit
def rows_seen(held, later, capacity, fresh_rows, RATIO: tl.constexpr):
    """Return how many of the cache's rows a token sees, and how many with the fresh ones.

    held: rows of the cache, or tokens if RATIO of them make a row; later: of the fresh ones.
    """
    if RATIO > 0:
        held, later = (held + later) // RATIO, 0
    held = tl.minimum(held, capacity)
    return held, held + tl.minimum(later, fresh_rows)


@triton.jit
def rotated(
    q, cos, sin, h, d,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Return values d [D] of heads h [H] of a query; the first ROPE values are rotated."""
    of = q + h[:, None] * SIZE
    turns = d < ROPE
    some = (h < HEADS)[:, None]
    pair, other, sign = partner_of(d, ROPE, INTERLEAVED)
    value = tl.load(of + d[None, :], some & (d < SIZE)[None, :], 0.0)
    partner = tl.load(of + other[None, :], some & turns[None, :], 0.0).to(tl.float32)
    turned = value.to(tl.float32) * tl.load(cos + pair, turns, 1.0)[None, :]
    turned += sign[None, :] * partner * tl.load(sin + pair, turns, 0.0)[None, :]
    return turned.to(value.dtype)


@triton.jit
def ordered(x):
    """Return integers that have the order of the numbers x.

    -0 is below 0, but all zeros among a token's scores have the same sign, from its weights.
    """
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), LEAST)


@triton.jit
def best_rows(
    scores, base, first,
    tokens, capacity, fresh_rows,
    chosen,
    RATIO: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program n chooses the COUNT positions with the highest scores for token n of all slots.

    The search finds `border`, the COUNT-th largest score. Each round sets its next two bits to the
    highest values with which at least COUNT scores reach the border; the search ends early if
    exactly COUNT scores reach it. Of scores equal to the border, those at the lowest positions are
    chosen. No function that the kernel calls may compute addresses of results: PyTorch would assume
    that such a function writes all that it reads.
    """
    n = tl.program_id(0).to(tl.int64)
    b, t = n // tokens, (n % tokens).to(tl.int32)
    held, later = tl.load(base + b).to(tl.int32), tl.load(first + b).to(tl.int32) + t + 1
    _, seen = rows_seen(held, later, capacity, fresh_rows, RATIO)
    row = scores + n * (capacity + fresh_rows)
    to = chosen + n * COUNT
    offset = tl.arange(0, BLOCK)
    if seen <= COUNT:
        for begin in range(0, COUNT, BLOCK):
            place = begin + offset
            tl.store(to + place, tl.where(place < seen, place, -1).to(tl.int64), place < COUNT)
    else:
        border, reached, above = LEAST, seen, 0  # counts: scores >= border, scores > border
        for i in range(16):
            if reached > COUNT:
                step = 1 << (30 - 2 * i)
                one, two, three = border + step, border + step + step, border + step + step + step
                first_reach = tl.zeros((BLOCK,), tl.int32)
                second_reach, third_reach = first_reach, first_reach
                for begin in range(0, seen, BLOCK):
                    score = tl.load(row + begin + offset, begin + offset < seen, LEAST)
                    first_reach += (score >= one).to(tl.int32)
                    second_reach += (score >= two).to(tl.int32)
                    third_reach += (score >= three).to(tl.int32)
                x, y, z = tl.sum(first_reach, 0), tl.sum(second_reach, 0), tl.sum(third_reach, 0)
                above = tl.where(z < COUNT, z, above)
                above = tl.where(y < COUNT, y, above)
                above = tl.where(x < COUNT, x, above)
                border = tl.where(x < COUNT, border, tl.where(y < COUNT, one, two))
                border = tl.where(z < COUNT, border, three)
                reached = tl.where(x < COUNT, reached, tl.where(y < COUNT, x, y))
                reached = tl.where(z < COUNT, reached, z)
        room, better_before, tied_before = COUNT - above, 0, 0
        for begin in range(0, seen, BLOCK):
            place = begin + offset
            score = tl.load(row + place, place < seen, LEAST)
            better = score > border
            tied = (score == border) & (place < seen)
            both = tl.cumsum(better.to(tl.int32) + (tied.to(tl.int32) << 16), 0)
            better_so_far, tied_so_far = better_before + (both & 0xFFFF), tied_before + (both >> 16)
            rank = better_so_far + tl.minimum(tied_so_far, room)
            tl.store(to + rank - 1, place.to(tl.int64), better | (tied & (tied_so_far <= room)))
            better_before, tied_before = tl.max(better_so_far, 0), tl.max(tied_so_far, 0)


def _choose_tiles(size: int, keys: torch.dtype) -> dict[str, Any]:
    """Choose tiles for heads of `size` values that fit into 48 KB of shared memory."""
    deep = round_up_to_tile(size)
    constants: dict[str, Any] = {"BLOCK_H": 16, "DEEP": deep}
    if keys == torch.float32:
        return constants | {"CHUNK": min(deep, 32), "BLOCK_N": 32, "PRECISION": "tf32x3"}
    return constants | {"CHUNK": deep, "BLOCK_N": 64, "PRECISION": "ieee"}


def choose_rows_launches(
    *operands: Any,
    rows: int | None = None,
    block: int | None = None,
    ratio: int = 0,
    key: int | None = None,
) -> Launches:
    """Return the op's launches.

    rows: rows that a program scores. block: positions that a program of the choice reads together.
    ratio: tokens that make a row, if there are no fresh rows. key: where a row's key begins; by
    default it is the row's end.
    """
    known = bind(choose_rows, operands)
    q = known["q"]
    B, T, H = known["weights"].shape
    count = known["count"]
    S, C = known["cache"].shape[2:]
    F = known["fresh"].shape[2]
    size = q.shape[-1] // H
    constants = _choose_tiles(size, known["cache"].dtype)
    if rows is not None:
        constants["BLOCK_N"] = rows
    if block is None:
        block = min(OPEN_BLOCK, round_up_to_tile(S + F)) if isinstance(S + F, int) else OPEN_BLOCK
    known |= {"tokens": T, "capacity": S, "fresh_rows": F, **constants, "BLOCK": block}
    known |= {"HEADS": H, "SIZE": size, "ROPE": 2 * known["cos"].shape[-1], "WIDTH": C}
    known |= {"RATIO": ratio, "KEY": C - size if key is None else key}
    scores = q.new_empty(B, T, S + F, dtype=torch.int32)
    chosen = q.new_empty(B, T, count, dtype=torch.int64)
    blocks = cdiv(S, constants["BLOCK_N"]) + cdiv(F, constants["BLOCK_N"])
    first = Launch.by_name(score_rows, (B * T, blocks), known, (scores,))
    known["scores"] = scores
    warps = max(1, min(16, block // 128))
    second = Launch.by_name(best_rows, (B * T,), known, (chosen,), warps=warps)
    return Launches((first, second), chosen)


choose_rows_triton = run_launches(choose_rows, choose_rows_launches, "q", "weights")
