"""moe in Triton: routing, then two products over the tokens of each expert that any token chose.

Each pair of a token and one of its experts has programs. The programs of an expert's first pair
compute all of its tokens; those of its other pairs return at once. So each chosen expert's weights
are read once, and nothing is sorted or gathered. A pair's row is zero if its expert is `NOBODY`, or
if an earlier pair of the same token has the same expert.
"""

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpbuild.plugins.definition import bind, empty_results
from mtpbuild.plugins.launch import (
    Launch,
    Launches,
    by_kernels,
    cdiv,
    run_launches,
    tile,
)
from mtpbuild.plugins.moe.op import MAX_TOKENS, moe, moe_route
from mtpbuild.plugins.tiles import (
    load_rows,
    split_count,
    tile_constants,
    tile_product,
    with_global_scales,
)


@triton.jit
def route(
    logits, bias,
    weights, ids,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, CHOSEN: tl.constexpr,
    NORMALISE: tl.constexpr, FACTOR: tl.constexpr, ALWAYS: tl.constexpr, ROW: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Program n chooses CHOSEN experts for token n and appends the ALWAYS shared ones.

    ROW and WIDE are EXPERTS and CHOSEN + ALWAYS rounded up to powers of two.
    """
    n = tl.program_id(0)
    x = tl.arange(0, ROW)
    there = x < EXPERTS
    scores = tl.sigmoid(tl.load(logits + n * EXPERTS + x, there, 0.0))
    biased = tl.where(there, scores + tl.load(bias + x, there, 0.0), float("-inf"))
    if KEPT < GROUPS:
        group = x // (EXPERTS // GROUPS)
        sums = tl.full((ROW,), float("-inf"), tl.float32)  # stored at each group's first expert
        for g in tl.static_range(GROUPS):
            mine = tl.where(group == g, biased, float("-inf"))
            first = tl.max(mine, 0)
            at = tl.min(tl.where(mine == first, x, ROW), 0)
            total = first + tl.max(tl.where(x == at, float("-inf"), mine), 0)
            sums = tl.where(x == g * (EXPERTS // GROUPS), total, sums)
        kept = tl.zeros((ROW,), tl.int32)
        for _ in tl.static_range(KEPT):
            at = tl.min(tl.where(sums == tl.max(sums, 0), x, ROW), 0)
            kept = tl.where(group == at // (EXPERTS // GROUPS), 1, kept)
            sums = tl.where(x == at, float("-inf"), sums)
        biased = tl.where(kept > 0, biased, float("-inf"))
    k = tl.arange(0, WIDE)
    chosen, weight = tl.zeros((WIDE,), tl.int32), tl.zeros((WIDE,), tl.float32)
    for i in tl.static_range(CHOSEN):
        at = tl.min(tl.where(biased == tl.max(biased, 0), x, ROW), 0)
        at = tl.minimum(at, EXPERTS - 1)  # for a row of NaN, which equals nothing
        chosen = tl.where(k == i, at, chosen)
        weight = tl.where(k == i, tl.sum(tl.where(x == at, scores, 0.0), 0), weight)
        biased = tl.where(x == at, float("-inf"), biased)
    if NORMALISE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    to = n * (CHOSEN + ALWAYS) + k
    tl.store(weights + to, tl.where(k < CHOSEN, weight * FACTOR, 1.0), k < CHOSEN + ALWAYS)
    tl.store(ids + to, tl.where(k < CHOSEN, chosen, EXPERTS + k - CHOSEN), k < CHOSEN + ALWAYS)


@triton.jit
def pairs_of_tokens(
    count,
    CHOSEN: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Return the indices of each token's pairs [TOKENS, WIDE], padded with `count`.

    The kernels load the ids themselves: if this function loaded them for use in an address, the
    compiler would assume that it writes to the pointer, and copy the tensor.
    """
    m, k = tl.arange(0, TOKENS)[:, None], tl.arange(0, WIDE)[None, :]
    p = m * CHOSEN + k
    return tl.where((p < count) & (k < CHOSEN), p, count)


@triton.jit
def rows_of_expert(pairs, count, BLOCK_M: tl.constexpr):
    """Count an expert's pairs; return 1 if one block holds all, so that there is no loop."""
    if pairs.shape[0] <= BLOCK_M:
        number: tl.constexpr = 1
    else:
        number = tl.sum((pairs < count).to(tl.int32), 0)
    return number


@triton.jit
def next_rows(pairs, count, done, BLOCK_M: tl.constexpr):
    """Mark the tokens [BLOCK_M, TOKENS] of the next BLOCK_M pairs after the first `done` ones.

    pairs [TOKENS]: each token's pair with the expert, or `count`.
    """
    number = tl.cumsum((pairs < count).to(tl.int32), 0) - 1
    wanted = done + tl.arange(0, BLOCK_M)
    return (number[None, :] == wanted[:, None]) & (pairs < count)[None, :]


@triton.jit
def gate_and_up(
    x, ids, gate_up, scales, scales_2,
    count,
    sums,
    CHOSEN: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, HIDDEN: tl.constexpr,
    INNER: tl.constexpr, BLOCK: tl.constexpr, BY_INPUT: tl.constexpr, WORDS: tl.constexpr,
    ASSEMBLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program (p, i, s) multiplies x by column block i of gate and up, for the expert of pair p.

    It sums split s of the inputs, for BLOCK_M of the expert's pairs at a time.
    """
    pair, split, splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    expert = tl.load(ids + pair).to(tl.int64)
    every = pairs_of_tokens(count, CHOSEN, WIDE, TOKENS)
    same = tl.load(ids + every, every < count, -1) == expert
    pairs = tl.min(tl.where(same, every, count), 1)  # each token's pair with this expert, or count
    if (expert >= 0) & (tl.min(pairs, 0) == pair):
        first = tl.program_id(1) * BLOCK_N
        n = first + tl.arange(0, BLOCK_N)
        share = tl.cdiv(tl.cdiv(HIDDEN, splits), BLOCK_K) * BLOCK_K
        start = split * share
        end = tl.minimum(start + share, HIDDEN)
        for done in range(0, rows_of_expert(pairs, count, BLOCK_M), BLOCK_M):
            taken = next_rows(pairs, count, done, BLOCK_M)
            rows = tl.min(tl.where(taken, pairs[None, :], count), 1)
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for begin in tl.range(start, end, BLOCK_K, num_stages=STAGES):
                given = load_rows(x, rows // CHOSEN, rows < count, begin, HIDDEN, BLOCK_K)
                total = tile_product(
                    total, given, gate_up, scales, scales_2, expert, begin, first,
                    HIDDEN, 2 * INNER, BLOCK, BY_INPUT, WORDS, ASSEMBLY, BLOCK_N, BLOCK_K,
                )  # fmt: skip
            total = with_global_scales(
                total, scales_2, expert, first, 2 * INNER, BY_INPUT, WORDS, BLOCK_N
            )
            to = sums + (split * count + rows)[:, None] * (2 * INNER) + n[None, :]
            tl.store(to, total, (rows < count)[:, None] & (n < 2 * INNER)[None, :])


@triton.jit
def gate_rows(
    sums, inner, rows, count,
    INNER: tl.constexpr, ROW: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Write silu(gate) * up for the rows of some pairs; gates and ups are sums of SPLITS rows."""
    i = tl.arange(0, ROW)[None, :]
    there = (rows < count)[:, None] & (i < INNER)
    at = sums + rows[:, None] * (2 * INNER) + i
    gate, up = tl.load(at, there, 0.0), tl.load(at + INNER, there, 0.0)
    for s in tl.static_range(1, SPLITS):
        further = at + s * count * (2 * INNER)
        gate += tl.load(further, there, 0.0)
        up += tl.load(further + INNER, there, 0.0)
    gated = gate * tl.sigmoid(gate) * up
    tl.store(inner + rows[:, None] * INNER + i, gated.to(inner.dtype.element_ty), there)


@triton.jit
def down(
    sums, weights, ids, down_proj, scales, scales_2,
    count,
    inner, parts,
    CHOSEN: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, HIDDEN: tl.constexpr,
    INNER: tl.constexpr, ROW: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    BY_INPUT: tl.constexpr, WORDS: tl.constexpr, ASSEMBLY: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (p, i) computes column block i of the weighted outputs of the expert of pair p.

    Its inputs are silu(gate) * up of `gate_and_up`'s SPLITS sums. Each of the expert's programs
    computes them for itself and writes the same values to `inner`. ROW is INNER rounded up to a
    power of two.
    """
    pair = tl.program_id(0)
    expert = tl.load(ids + pair).to(tl.int64)
    every = pairs_of_tokens(count, CHOSEN, WIDE, TOKENS)
    same = tl.load(ids + every, every < count, -1) == expert
    pairs = tl.min(tl.where(same, every, count), 1)
    first = tl.program_id(1) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    right = n < HIDDEN
    before = tl.arange(0, WIDE)
    earlier = tl.load(ids + pair // CHOSEN * CHOSEN + before, before < pair % CHOSEN, -1)
    if (expert < 0) | (tl.max((earlier == expert).to(tl.int32), 0) > 0):
        tl.store(parts + pair * HIDDEN + n, tl.zeros((BLOCK_N,), tl.float32), right)
    elif tl.min(pairs, 0) == pair:
        if TOKENS <= BLOCK_M:  # most experts have one token
            i = tl.arange(0, ROW)
            row = pair
            while row < count:
                at = sums + row * (2 * INNER) + i
                gate = tl.load(at, i < INNER, 0.0)
                up = tl.load(at + INNER, i < INNER, 0.0)
                for s in tl.static_range(1, SPLITS):
                    at = sums + (s * count + row) * (2 * INNER) + i
                    gate += tl.load(at, i < INNER, 0.0)
                    up += tl.load(at + INNER, i < INNER, 0.0)
                gated = gate * tl.sigmoid(gate) * up
                tl.store(inner + row * INNER + i, gated.to(inner.dtype.element_ty), i < INNER)
                row = tl.min(tl.where(pairs > row, pairs, count), 0)
        else:
            for done in range(0, rows_of_expert(pairs, count, 4), 4):  # as registers allow
                taken = next_rows(pairs, count, done, 4)
                rows = tl.min(tl.where(taken, pairs[None, :], count), 1)
                gate_rows(sums, inner, rows, count, INNER, ROW, SPLITS)
        tl.debug_barrier()  # threads read what other threads have written
        every_weight = tl.sum(tl.load(weights + every, same & (every < count), 0.0), 1)
        for done in range(0, rows_of_expert(pairs, count, BLOCK_M), BLOCK_M):
            taken = next_rows(pairs, count, done, BLOCK_M)
            rows = tl.min(tl.where(taken, pairs[None, :], count), 1)
            value = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for begin in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
                given = load_rows(inner, rows, rows < count, begin, INNER, BLOCK_K)
                value = tile_product(
                    value, given, down_proj, scales, scales_2, expert, begin, first,
                    INNER, HIDDEN, BLOCK, BY_INPUT, WORDS, ASSEMBLY, BLOCK_N, BLOCK_K,
                )  # fmt: skip
            value = with_global_scales(
                value, scales_2, expert, first, HIDDEN, BY_INPUT, WORDS, BLOCK_N
            )
            weight = tl.sum(tl.where(taken, every_weight[None, :], 0.0), 1)
            to = parts + rows[:, None] * HIDDEN + n[None, :]
            tl.store(to, value * weight[:, None], (rows < count)[:, None] & right[None, :])


def moe_route_launches(*operands: Any) -> Launches:
    """Return the launch of moe_route."""
    known = bind(moe_route, operands)
    logits, bias = known["logits"], known["bias"]
    *axes, X = logits.shape
    names = ("groups", "kept_groups", "experts", "normalise", "factor")
    kernels = ("GROUPS", "KEPT", "CHOSEN", "NORMALISE", "FACTOR")
    constants = {"EXPERTS": X, "ROW": tile(X, 2), "ALWAYS": known["always"]}
    constants |= {to: known[name] for to, name in zip(kernels, names, strict=True)}
    constants["WIDE"] = tile(known["experts"] + known["always"], 2)
    results = empty_results(moe_route, known)
    launch = Launch(route, (prod(axes),), (logits, bias), (), results, constants, warps=1)
    return Launches((launch,), results)


def moe_launches(*operands: Any) -> Launches:
    """Return the launches of moe; the caller sums their result [N, k, E] over k.

    The rounding of a token's sums does not depend on the number of tokens, which may be a symbol if
    the op's `most` bounds it. Raises NotImplementedError for more than `MAX_TOKENS` tokens.
    """
    known = bind(moe, operands)
    x, (N, k) = known["x"], known["ids"].shape
    most = known["most"] or N
    if most > MAX_TOKENS:
        raise NotImplementedError(f"moe takes up to {MAX_TOKENS} tokens, not {most}")
    count, E, width = N * k, x.shape[1], known["gate_up_proj"].shape[2] // 2
    known |= {"count": count, "gate_up": known["gate_up_proj"]}
    known |= {"CHOSEN": k, "WIDE": tile(k, 2), "TOKENS": tile(most, 2), "HIDDEN": E, "INNER": width}
    known["ROW"] = tile(width)

    def own(weight: str) -> dict[str, Any]:
        scales, scales_2 = known[f"{weight}_scales"], known[f"{weight}_scales_2"]
        constants = tile_constants(x, known[f"{weight}_proj"], scales, scales_2)
        return {"scales": scales, "scales_2": scales_2, **constants}

    up, down_ = own("gate_up"), own("down")
    grid = count, cdiv(2 * width, up["BLOCK_N"])
    splits = split_count(k * grid[1], E, up)  # counts the programs of a single token
    sums = x.new_empty(splits, count, 2 * width, dtype=torch.float32)
    parts = known["weights"].new_empty(N, k, E)
    known |= {"sums": sums, "SPLITS": splits}
    first = Launch.by_name(gate_and_up, (*grid, splits), known | up, {"sums": sums})
    grid, outputs = (count, cdiv(E, down_["BLOCK_N"])), {"inner": x.new_empty(count, width)}
    second = Launch.by_name(down, grid, known | down_, outputs | {"parts": parts})
    return Launches((first, second), parts)


moe_route_triton = run_launches(moe_route, moe_route_launches)


@by_kernels(moe)
def moe_triton(x: Tensor, *operands: Any) -> Tensor:
    """Run moe on a GPU."""
    return moe_launches(x, *operands).run().sum(1).type_as(x)
