"""mla_attention in Triton: partial softmaxes over splits of the rows, then their combination."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpbuild.plugins.definition import bind
from mtpbuild.plugins.launch import (
    MULTIPROCESSORS,
    Launch,
    Launches,
    cdiv,
    is_hopper,
    round_up_to_tile,
    run_launches,
    shared_memory,
)
from mtpbuild.plugins.mla_attention.op import mla_attention

MANY_ROWS = 256  # query rows of all slots from which on launches fill a GPU by themselves
LEAST_ROWS = 32  # minimum of a split's committed rows, times the number of blocks of query rows
MAX_LEAST_ROWS = 64  # upper limit of that product; each split writes sums for every query row
OPEN_ROWS = 512  # rows of capacity per split in a symbolic batch: each slot needs memory for sums
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def mla_partial(
    q, cache, fresh, base, first, chosen,
    capacity, fresh_rows,
    out, lse,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    WIDTH: tl.constexpr, FRESH_WIDTH: tl.constexpr, FRESH_AT: tl.constexpr, COUNT: tl.constexpr,
    SCALE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LATENT: tl.constexpr,
    ROTARY: tl.constexpr, WANTED: tl.constexpr, LEAST: tl.constexpr, STAGES: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (b, m, s) attends with block m of slot b's HEADS * TOKENS query rows to split s.

    A slot's rows are distributed in whole tiles of BLOCK_N over as many splits as give the launch
    WANTED programs, but each split has at least LEAST rows. So a slot's cost depends on its rows,
    not on its capacity. The fresh rows are the last tile: their split has fewer committed rows.
    out [B, splits, HEADS * TOKENS, RANK] is normalised within the split; lse [B, splits, HEADS *
    TOKENS] is the base-2 logarithm of the sum of weights. A split without rows writes only its lse,
    -inf. The cache's tiles are copied to shared memory STAGES - 1 tiles ahead, tiles of the few
    fresh rows are not.

    With `chosen`, a block's query rows are heads of one token. Its COUNT positions are distributed
    over the splits, and a split reads the rows at its positions. Rows have WIDTH values, fresh ones
    FRESH_WIDTH, of which the first FRESH_AT are left out.
    """
    b = tl.program_id(0).to(tl.int64)
    split, splits = tl.program_id(2), tl.num_programs(2)
    rows: tl.constexpr = HEADS * TOKENS
    width: tl.constexpr = RANK + ROPE
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)  # query row: head * TOKENS + token
    some = (m < rows)[:, None]
    if chosen is not None:
        blocks: tl.constexpr = (HEADS + BLOCK_M - 1) // BLOCK_M
        token, head = tl.program_id(1) // blocks, tl.program_id(1) % blocks * BLOCK_M
        head += tl.arange(0, BLOCK_M)
        m, some = head * TOKENS + token, (head < HEADS)[:, None]
    latent, rotary = tl.arange(0, LATENT)[None, :], tl.arange(0, ROTARY)[None, :]
    queries = q + (b * rows + m)[:, None] * width
    query = tl.load(queries + latent, some & (latent < RANK), 0.0)
    turned = tl.load(queries + RANK + rotary, some & (rotary < ROPE), 0.0)
    scale = SCALE * LOG2E

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, LATENT), tl.float32)
    length = tl.load(base + b).to(tl.int32)
    used = tl.cdiv(WANTED, tl.num_programs(0) * tl.num_programs(1))
    total, tiles = length, tl.cdiv(length, BLOCK_N) + 1
    if chosen is not None:
        total, tiles = COUNT, (COUNT + BLOCK_N - 1) // BLOCK_N
    used = tl.minimum(tl.minimum(used, splits), tl.cdiv(tiles * BLOCK_N, LEAST))
    share = tl.cdiv(tiles, used) * BLOCK_N
    begin = split * share
    end = tl.minimum(begin + share, total)
    old, new = cache + b * capacity * WIDTH, fresh + b * fresh_rows * FRESH_WIDTH + FRESH_AT
    if chosen is not None:
        places = chosen + (b * TOKENS + token) * COUNT
        newest = length + fresh_rows - 1
        least = tl.load(places + begin, begin < end, -1)
        filled = (split == 0) | ((least >= 0) & (least <= newest))
        end = tl.where(filled, end, begin)
    for n in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        j = n + tl.arange(0, BLOCK_N)
        at, seen = old + j.to(tl.int64) * WIDTH, j < end
        if chosen is not None:
            at, seen = _at_places(
                places, n, end, old, new, length, newest, WIDTH, FRESH_WIDTH, FRESH_AT, BLOCK_N
            )
        top, weight, mixed = _attend(
            queries, some, query, turned, at, seen, seen[None, :], scale, top, weight, mixed,
            RANK, ROPE, LATENT, ROTARY, CHUNK, PRECISION,
        )  # fmt: skip
    if chosen is None:
        last_split = (tiles - 1) * BLOCK_N // share
        filled = split <= last_split
        if split == last_split:
            start = tl.load(first + b).to(tl.int32)
            last = start + m % TOKENS
            end_fresh = tl.minimum(fresh_rows, start + TOKENS)  # rows after that may be garbage
            for n in tl.range(0, end_fresh, BLOCK_N, num_stages=1):
                j = n + tl.arange(0, BLOCK_N)
                at, there = new + j.to(tl.int64) * FRESH_WIDTH, j < end_fresh
                seen = (j[None, :] <= last[:, None]) & there[None, :]
                top, weight, mixed = _attend(
                    queries, some, query, turned, at, there, seen, scale, top, weight, mixed,
                    RANK, ROPE, LATENT, ROTARY, CHUNK, PRECISION,
                )  # fmt: skip

    row = (b * splits + split) * rows + m
    some_weight = tl.maximum(weight, 1.0)  # a weight is below 1 only in a split without rows
    tl.store(lse + row[:, None], (top + tl.log2(some_weight))[:, None], some)
    if filled:
        to = out + row[:, None] * RANK + latent
        tl.store(to, (mixed / weight[:, None]).to(out.dtype.element_ty), some & (latent < RANK))


@triton.jit
def _at_places(
    places, n, end, old, new, length, newest,
    WIDTH: tl.constexpr, FRESH_WIDTH: tl.constexpr, FRESH_AT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return pointers to a tile's chosen rows, and which of them are seen.

    An idle slot may have any positions, but its result must be finite. So the first place is always
    seen, and positions are clamped.
    """
    j = n + tl.arange(0, BLOCK_N)
    place = tl.load(places + j, j < end, -1)
    seen = ((place >= 0) & (place <= newest)) | (j == 0)
    place = tl.minimum(tl.maximum(place, 0), newest)
    at = tl.where(place < length, old + place * WIDTH, new + (place - length) * FRESH_WIDTH)
    if WIDTH % 8 == 0 and FRESH_WIDTH % 8 == 0 and FRESH_AT % 8 == 0:
        at = tl.multiple_of(at, 16)  # bytes; the compiler can't derive it through the `where`
    return at, seen


@triton.jit
def _attend(
    queries, some, query, turned, rows, there, seen, scale,
    top, weight, mixed,
    RANK: tl.constexpr, ROPE: tl.constexpr, LATENT: tl.constexpr,
    ROTARY: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a tile of rows at the pointers `rows` [N] to the running softmax; `there` masks rows.

    seen [M or 1, N]: which query sees which row. The first tile contains a row that every query
    sees, so `top` is finite from then on. The latent part of a tile is loaded once and serves as
    keys and values. With a CHUNK below LATENT, scores are summed chunk by chunk, and each chunk is
    loaded again: whole tiles do not fit into registers in fp32, nor into the shared memory of an
    AOT plugin.
    """
    at, there = rows[:, None], there[:, None]
    latent, rotary = tl.arange(0, LATENT)[None, :], tl.arange(0, ROTARY)[None, :]
    values = tl.load(at + latent, there & (latent < RANK), 0.0)
    k = tl.load(at + RANK + rotary, there & (rotary < ROPE), 0.0)
    scores = tl.dot(turned, tl.trans(k), input_precision=PRECISION)
    if CHUNK == LATENT:
        scores = tl.dot(query, tl.trans(values), scores, input_precision=PRECISION)
    else:
        for c in tl.range(0, LATENT, CHUNK, num_stages=3):
            chunk = c + tl.arange(0, CHUNK)[None, :]
            a = tl.load(queries + chunk, some & (chunk < RANK), 0.0)
            part = tl.load(at + chunk, there & (chunk < RANK), 0.0)
            scores = tl.dot(a, tl.trans(part), scores, input_precision=PRECISION)
    scores = tl.where(seen, scores * scale, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    p = tl.exp2(scores - highest[:, None])
    fade = tl.exp2(top - highest)
    weight = weight * fade + tl.sum(p, 1)
    faded = mixed * fade[:, None]
    mixed = tl.dot(p.to(query.dtype), values, faded, input_precision=PRECISION)
    return highest, weight, mixed


@triton.jit
def mla_combine(
    partial, lse, sinks,
    rows, splits,
    out,
    TOKENS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Program (b, m, l) combines block l (BLOCK_L latents) of slot b's query row m from its splits.

    It reads BLOCK_S splits at a time, up to the last one that has rows. SPLITS is `splits` rounded
    up to a power of two. sinks: a score of each head, TOKENS query rows, that has no value.
    """
    b, m = tl.program_id(0).to(tl.int64), tl.program_id(1)
    latent = tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L)
    every = tl.arange(0, SPLITS)
    sums = tl.load(lse + (b * splits + every) * rows + m, every < splits, float("-inf"))
    top = tl.max(sums, 0)
    weight = tl.sum(tl.exp2(sums - top), 0)
    if sinks is not None:
        sink = tl.load(sinks + m // TOKENS).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        weight = weight * tl.exp2(top - higher) + tl.exp2(sink - higher)
        top = higher
    used = tl.max(tl.where(sums > float("-inf"), every + 1, 0), 0)
    mixed = tl.zeros((BLOCK_L,), tl.float32)
    for begin in range(0, used, BLOCK_S):
        s = begin + tl.arange(0, BLOCK_S)
        row = (b * splits + s) * rows + m
        part = tl.exp2(tl.load(lse + row, s < splits, float("-inf")) - top)
        there = (part > 0)[:, None] & (latent < RANK)[None, :]
        values = tl.load(partial + row[:, None] * RANK + latent[None, :], there, 0.0)
        mixed += tl.sum(part[:, None] * values, 0)
    to = out + (b * rows + m) * RANK + latent
    tl.store(to, (mixed / weight).to(out.dtype.element_ty), latent < RANK)


def _choose_tiles(
    many: bool, rank: int, rope: int, cache: torch.dtype, shared: int
) -> tuple[dict[str, Any], int]:
    """Choose tiles for a cache of this dtype and `shared` bytes of shared memory.

    Returns the kernel's constants and its warps. BLOCK_M is the number of query rows, BLOCK_N that
    of keys per iteration, CHUNK that of latents per product of scores. STAGES is one more than the
    tiles of keys in shared memory. many: take 64 query rows, which read the cache once instead of
    four times; only Hopper's products of a warp group have room for their sums.
    """
    latent = round_up_to_tile(rank)
    constants = dict[str, Any](BLOCK_M=16, BLOCK_N=16, STAGES=2)
    if cache == torch.float32:
        return constants | {"CHUNK": min(latent, 64), "PRECISION": "tf32x3"}, 8
    constants["PRECISION"] = "ieee"
    width = latent + round_up_to_tile(rope)
    if many and 3 * 64 * width * cache.itemsize <= shared:
        return constants | {"CHUNK": latent, "BLOCK_M": 64, "BLOCK_N": 64}, 8
    for n in (32, 16):
        if (16 * 2 + 2 * n * cache.itemsize) * width + (16 << 10) <= shared:
            return constants | {"CHUNK": latent, "BLOCK_N": n, "STAGES": 3}, 4
    return constants | {"CHUNK": min(latent, 128)}, 4


def _count_splits(slots: int, blocks: int, capacity: int, least: int) -> int:
    """Return the maximum of splits per slot; with a symbolic number of slots it is lower."""
    if isinstance(slots, int):
        return max(1, min(MULTIPROCESSORS // (slots * blocks), cdiv(capacity, least)))
    return max(1, min(MULTIPROCESSORS // blocks, cdiv(capacity, OPEN_ROWS)))


def _choose_combining(slots: int, rows: int, splits: int, latent: int) -> dict[str, int]:
    """Choose tiles of `mla_combine`: of few rows many programs read few columns each."""
    few = isinstance(slots, int) and slots * rows < MANY_ROWS
    deep, wide = (64, 32) if few else (16, 128)
    return {"BLOCK_S": min(deep, round_up_to_tile(splits, 2)), "BLOCK_L": min(latent, wide)}


def mla_attention_launches(
    *operands: Any,
    splits: int | None = None,
    shared: int | None = None,
    least: int | None = None,
    sinks: Tensor | None = None,
    fresh_at: int = 0,
) -> Launches:
    """Return the op's launches.

    By default, splits, the bytes of shared memory and the minimum of rows per split are chosen for
    the operands and their GPU. sinks [H]: as `compressed_attention` has them. Fresh rows may be
    wider than the cache's; their first `fresh_at` values are left out.
    """
    known = bind(mla_attention, operands) | {"sinks": sinks, "fresh_at": fresh_at}
    q = known["q"]
    capacity = known["cache"].shape[2]
    rank = known["kv_lora_rank"]
    B, H, T, C = q.shape
    rows = H * T
    rope = C - rank
    latent = round_up_to_tile(rank)
    chosen = known["chosen"]
    if shared is None:
        shared = shared_memory(q.device)
    together = rows if chosen is None else H  # query rows that see the same rows of the cache
    many = together >= 64 and not (isinstance(B, int) and B * rows < MANY_ROWS)
    constants, warps = _choose_tiles(
        many and is_hopper(q.device), rank, rope, known["cache"].dtype, shared
    )
    blocks = cdiv(rows, constants["BLOCK_M"])
    total = capacity
    count = 0
    if chosen is not None:
        blocks, total = T * cdiv(H, constants["BLOCK_M"]), chosen.shape[2]
        count = total
    if least is None:
        least = min(MAX_LEAST_ROWS, LEAST_ROWS * blocks)
    if splits is None:
        splits = _count_splits(B, blocks, total, least)
    lse = q.new_empty(B, splits, rows, dtype=torch.float32)
    out = q.new_empty(B, H, T, rank)
    whole = splits == 1 and sinks is None
    partial = out if whole else lse.new_empty(B, splits, rows, rank)
    known |= {"capacity": capacity, "fresh_rows": known["fresh"].shape[2], "rows": rows}
    known |= {"HEADS": H, "TOKENS": T, "RANK": rank, "ROPE": rope, "COUNT": count, **constants}
    known["FRESH_WIDTH"] = known["fresh"].shape[3]
    known |= {"LATENT": latent, "ROTARY": round_up_to_tile(rope), "WIDTH": known["cache"].shape[3]}
    known |= {"WANTED": MULTIPROCESSORS, "LEAST": least, "partial": partial, "lse": lse}
    known |= {"splits": splits, "SPLITS": round_up_to_tile(splits, 2)}
    known |= _choose_combining(B, rows, splits, latent)
    grid = B, blocks, splits
    first = Launch.by_name(mla_partial, grid, known, (partial, lse), warps=warps)
    if whole:
        return Launches((first,), out)
    grid = B, rows, cdiv(rank, known["BLOCK_L"])
    return Launches((first, Launch.by_name(mla_combine, grid, known, (out,))), out)


mla_attention_triton = run_launches(mla_attention, mla_attention_launches, "q", "fresh")
