"""mla_attention in Triton: partial softmaxes over splits of the cache, then their combination."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpbuild.plugins.launch import Launch, Launches, bind, by_kernels, cdiv, shared_memory, tile
from mtpbuild.plugins.mla_attention.op import mla_attention

PROGRAMS = 2 * 132  # enough for every multiprocessor of an H100
SPLIT_ROWS = 512  # of the capacity, for each split that there may be
LEAST_ROWS = 64  # of what a slot holds: fewer cost more in partial sums than they save
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def mla_partial(
    q, cache, fresh, base, first, k_scale,
    capacity, fresh_rows,
    out, lse,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    SCALE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LATENT: tl.constexpr,
    ROTARY: tl.constexpr, CHUNK: tl.constexpr, WANTED: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Program (b, m, s) has BLOCK_M of slot b's HEADS * TOKENS query rows and split s of its cache.

    A slot's committed rows are dealt evenly to as many splits as WANTED programs of the whole call
    need, of LEAST rows or more. So what a slot holds decides its cost, not what it could hold. The
    last split also takes the fresh rows. out [B, splits, HEADS * TOKENS, RANK] is normalised
    within the split, lse [B, splits, HEADS * TOKENS] is the base-2 logarithm of the weights' sum.
    A split without rows writes only its lse, -inf.
    """
    b = tl.program_id(0).to(tl.int64)
    split, splits = tl.program_id(2), tl.num_programs(2)
    rows: tl.constexpr = HEADS * TOKENS
    width: tl.constexpr = RANK + ROPE
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)  # query row: head * TOKENS + token
    latent = tl.arange(0, LATENT)
    queries = q + (b * rows + m)[:, None] * width
    some = (m < rows)[:, None]
    scale = SCALE * LOG2E
    if k_scale is not None:
        scale = scale * tl.load(k_scale)

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, LATENT), tl.float32)
    length = tl.load(base + b).to(tl.int32)
    used = tl.cdiv(WANTED, tl.num_programs(0) * tl.num_programs(1))
    used = tl.maximum(tl.minimum(tl.minimum(used, splits), length // LEAST), 1)
    share = tl.cdiv(tl.cdiv(length, used), BLOCK_N) * BLOCK_N
    begin = split * share
    end = tl.minimum(begin + share, length)
    last = tl.zeros((BLOCK_M,), tl.int32) + (end - 1)
    for n in range(begin, end, BLOCK_N):
        top, weight, mixed = _attend(
            queries, some, cache + b * capacity * width, n, end, last, scale,
            top, weight, mixed, RANK, ROPE, BLOCK_N, LATENT, ROTARY, CHUNK,
        )  # fmt: skip
    if split == splits - 1:
        start = tl.load(first + b).to(tl.int32)
        last = start + m % TOKENS
        end_fresh = tl.minimum(fresh_rows, start + TOKENS)  # garbage may follow
        for n in range(0, end_fresh, BLOCK_N):
            top, weight, mixed = _attend(
                queries, some, fresh + b * fresh_rows * width, n, end_fresh, last, scale,
                top, weight, mixed, RANK, ROPE, BLOCK_N, LATENT, ROTARY, CHUNK,
            )  # fmt: skip

    row = (b * splits + split) * rows + m
    some_weight = tl.maximum(weight, 1.0)  # at least that, but for a split without rows
    tl.store(lse + row, top + tl.log2(some_weight), m < rows)
    if begin < end or split == splits - 1:
        mixed = mixed / weight[:, None]
        if k_scale is not None:
            mixed = mixed * tl.load(k_scale)
        to = out + row[:, None] * RANK + latent[None, :]
        tl.store(to, mixed.to(out.dtype.element_ty), some & (latent < RANK)[None, :])


@triton.jit
def _attend(
    queries, some, keys, n, end, last, scale,
    top, weight, mixed,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_N: tl.constexpr, LATENT: tl.constexpr,
    ROTARY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Take one tile of keys into the running softmax; row j is seen if j <= last [BLOCK_M].

    The first tile holds a row that every query sees, so `top` is finite from then on. Scores are
    summed by CHUNKs of the latent: that bounds the shared memory which queries and keys need.
    """
    j = n + tl.arange(0, BLOCK_N)
    at = keys + j.to(tl.int64)[:, None] * (RANK + ROPE)
    there = (j < end)[:, None]
    rotary = tl.arange(0, ROTARY)[None, :]
    a = tl.load(queries + RANK + rotary, some & (rotary < ROPE), 0.0)
    k = tl.load(at + RANK + rotary, there & (rotary < ROPE), 0.0).to(a.dtype)
    scores = tl.dot(a, tl.trans(k), input_precision="ieee")
    for c in tl.static_range(0, LATENT, CHUNK):
        chunk = c + tl.arange(0, CHUNK)[None, :]
        a = tl.load(queries + chunk, some & (chunk < RANK), 0.0)
        k = tl.load(at + chunk, there & (chunk < RANK), 0.0).to(a.dtype)
        scores = tl.dot(a, tl.trans(k), scores, input_precision="ieee")
    seen = (j[None, :] <= last[:, None]) & (j < end)[None, :]
    scores = tl.where(seen, scores * scale, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    p = tl.exp2(scores - highest[:, None])
    fade = tl.exp2(top - highest)
    weight = weight * fade + tl.sum(p, 1)
    latent = tl.arange(0, LATENT)[None, :]
    values = tl.load(at + latent, there & (latent < RANK), 0.0).to(a.dtype)
    mixed = tl.dot(p.to(a.dtype), values, mixed * fade[:, None], input_precision="ieee")
    return highest, weight, mixed


@triton.jit
def mla_combine(
    partial, lse,
    rows, splits,
    out,
    RANK: tl.constexpr, LATENT: tl.constexpr,
):  # fmt: skip
    """Program (b, m) combines query row m of slot b from those of its splits that have rows."""
    b, m = tl.program_id(0).to(tl.int64), tl.program_id(1)
    latent = tl.arange(0, LATENT)
    top = float("-inf")
    for s in range(splits):
        top = tl.maximum(top, tl.load(lse + (b * splits + s) * rows + m))
    weight = 0.0
    mixed = tl.zeros((LATENT,), tl.float32)
    for s in range(splits):
        row = (b * splits + s) * rows + m
        part = tl.exp2(tl.load(lse + row) - top)
        if part > 0:
            weight += part
            mixed += part * tl.load(partial + row * RANK + latent, latent < RANK, 0.0)
    to = out + (b * rows + m) * RANK + latent
    tl.store(to, (mixed / weight).to(out.dtype.element_ty), latent < RANK)


def tiles(rows: int, rank: int, rope: int, each: int, shared: int) -> tuple[dict[str, int], int]:
    """Choose the largest tiles for `rows` query rows whose keys and queries fit `shared` bytes.

    A value has `each` bytes. Returns query rows and keys per step and latent values per product, as
    the kernel's constants, and warps.
    DeepSeek's 576 bf16 values get 64 x 32 (139 KB) on data-centre GPUs from 16 heads and 4 tokens
    on, and 16 x 16 in chunks of 128 (35 KB) as an AOT plugin.
    """
    latent, width = tile(rank), tile(rank) + tile(rope)
    for m, n in ((64, 32), (32, 32), (16, 32), (16, 16)):
        if m <= tile(rows) and (m + 2 * n) * width * each <= shared:
            return {"BLOCK_M": m, "BLOCK_N": n, "CHUNK": latent}, 8 if m == 64 else 4
    return {"BLOCK_M": 16, "BLOCK_N": 16, "CHUNK": min(latent, 128)}, 4


def split_count(slots: int, blocks: int, capacity: int) -> int:
    """Count the splits that there may be; an open batch (a symbol) has those of one slot."""
    known = slots if isinstance(slots, int) else 1
    return max(1, min(PROGRAMS // (known * blocks), cdiv(capacity, SPLIT_ROWS)))


def mla_attention_launches(
    *operands: Any, splits: int | None = None, shared: int | None = None, least: int = LEAST_ROWS
) -> Launches:
    """Make the launches for the op's operands.

    The splits and the bytes of shared memory are those that fit, if they are not given. least: rows
    of a split.
    """
    known = bind(mla_attention, operands)
    q, capacity, rank = known["q"], known["cache"].shape[2], known["kv_lora_rank"]
    B, H, T, C = q.shape
    rows, rope, latent = H * T, C - rank, tile(rank)
    if shared is None:
        shared = shared_memory(q.device)
    constants, warps = tiles(rows, rank, rope, q.element_size(), shared)
    blocks = cdiv(rows, constants["BLOCK_M"])
    if splits is None:
        splits = split_count(B, blocks, capacity)
    lse = q.new_empty(B, splits, rows, dtype=torch.float32)
    out = q.new_empty(B, H, T, rank)
    partial = out if splits == 1 else lse.new_empty(B, splits, rows, rank)
    known |= {"capacity": capacity, "fresh_rows": known["fresh"].shape[2]}
    known |= {"HEADS": H, "TOKENS": T, "RANK": rank, "ROPE": rope, "SCALE": known["scale"]}
    known |= {"LATENT": latent, "ROTARY": tile(rope), **constants}
    known |= {"WANTED": PROGRAMS, "LEAST": least}
    made, grid = {"out": partial, "lse": lse}, (B, blocks, splits)
    first = Launch.by_name(mla_partial, grid, known, made, warps)
    if splits == 1:
        return Launches((first,), out)
    known |= {"partial": partial, "lse": lse, "rows": rows, "splits": splits}
    return Launches((first, Launch.by_name(mla_combine, (B, rows), known, {"out": out})), out)


@by_kernels(mla_attention)
def mla_attention_triton(q: Tensor, cache: Tensor, fresh: Tensor, *others: Any) -> Tensor:
    """Do the op on a GPU."""
    return mla_attention_launches(q.contiguous(), cache, fresh.contiguous(), *others).run()
