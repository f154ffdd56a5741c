"""moe in Triton: routing, then two products over the tokens of each expert that any token chose.

Every pair of a token and its expert has its programs; the expert's first pair does all of its
tokens, the others leave at once. So a chosen expert's weights are read once, by whoever needs
them, and nothing is sorted or gathered. A pair whose expert is nobody, or that the token has named
before, is a row of zeros.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mtpbuild.plugins.launch import Launch, Launches, bind, by_kernels, cdiv, tile
from mtpbuild.plugins.matmul_scaled.triton import scaled_tile
from mtpbuild.plugins.moe.op import MAX_TOKENS, empty_routes, moe, moe_route

PROGRAMS = 132  # an H100's multiprocessors


@triton.jit
def route(
    logits, bias,
    weights, ids,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, CHOSEN: tl.constexpr,
    NORMALISE: tl.constexpr, FACTOR: tl.constexpr, ALWAYS: tl.constexpr, ROW: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Program n chooses CHOSEN experts for token n, behind which come the ALWAYS shared ones.

    ROW and WIDE are EXPERTS and CHOSEN + ALWAYS as powers of two.
    """
    n = tl.program_id(0)
    x = tl.arange(0, ROW)
    there = x < EXPERTS
    scores = tl.sigmoid(tl.load(logits + n * EXPERTS + x, there, 0.0))
    biased = tl.where(there, scores + tl.load(bias + x, there, 0.0), float("-inf"))
    if KEPT < GROUPS:
        group = x // (EXPERTS // GROUPS)
        sums = tl.full((ROW,), float("-inf"), tl.float32)  # at each group's first expert
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
    CHOSEN: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Number the pairs of each token [BLOCK_M, WIDE]; the rest is filled up with count.

    (Ids are loaded by the kernels: the compiler takes a pointer that a function gets, and whose
    result is part of an address, for one that is written to, and copies what is there.)
    """
    m, k = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, WIDE)[None, :]
    p = m * CHOSEN + k
    return tl.where((p < count) & (k < CHOSEN), p, count)


@triton.jit
def gate_and_up(
    x, ids, gate_up, scales, scales_2,
    count,
    inner,
    CHOSEN: tl.constexpr, WIDE: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (p, i) computes BLOCK_N columns of silu(x gate) * (x up) for the expert of pair p."""
    pair = tl.program_id(0)
    expert = tl.load(ids + pair).to(tl.int64)
    every = pairs_of_tokens(count, CHOSEN, WIDE, BLOCK_M)
    same = tl.load(ids + every, every < count, -1) == expert
    pairs = tl.min(tl.where(same, every, count), 1)  # each token's with this expert, or count
    if (expert >= 0) & (tl.min(pairs, 0) == pair):
        some = (pairs < count)[:, None]
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        right = n < INNER
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for begin in range(0, HIDDEN, BLOCK_K):
            k = begin + tl.arange(0, BLOCK_K)
            deep = k < HIDDEN
            at = x + (pairs // CHOSEN)[:, None] * HIDDEN + k[None, :]
            rows = tl.load(at, some & deep[None, :], 0.0)
            if scales is None:
                of = gate_up + (expert * HIDDEN + k)[:, None] * (2 * INNER) + n[None, :]
                there = deep[:, None] & right[None, :]
                gates, ups = tl.load(of, there, 0.0), tl.load(of + INNER, there, 0.0)
            else:
                gates = scaled_tile(
                    gate_up, scales, scales_2, expert, begin, k, n, deep, right,
                    HIDDEN, 2 * INNER, BLOCK, False, BLOCK_K,
                ).to(rows.dtype)  # fmt: skip
                ups = scaled_tile(
                    gate_up, scales, scales_2, expert, begin, k, n + INNER, deep, right,
                    HIDDEN, 2 * INNER, BLOCK, False, BLOCK_K,
                ).to(rows.dtype)  # fmt: skip
            gate = tl.dot(rows, gates, gate, input_precision="ieee")
            up = tl.dot(rows, ups, up, input_precision="ieee")
        value = gate * tl.sigmoid(gate) * up
        to = inner + pairs[:, None] * INNER + n[None, :]
        tl.store(to, value.to(inner.dtype.element_ty), some & right[None, :])


@triton.jit
def down(
    inner, weights, ids, down_proj, scales, scales_2,
    count,
    parts,
    CHOSEN: tl.constexpr, WIDE: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (p, i) computes BLOCK_N columns of the weighted outputs of the expert of pair p."""
    pair = tl.program_id(0)
    expert = tl.load(ids + pair).to(tl.int64)
    every = pairs_of_tokens(count, CHOSEN, WIDE, BLOCK_M)
    same = tl.load(ids + every, every < count, -1) == expert
    pairs = tl.min(tl.where(same, every, count), 1)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    right = n < HIDDEN
    before = tl.arange(0, WIDE)
    earlier = tl.load(ids + pair // CHOSEN * CHOSEN + before, before < pair % CHOSEN, -1)
    if (expert < 0) | (tl.max((earlier == expert).to(tl.int32), 0) > 0):
        tl.store(parts + pair * HIDDEN + n, tl.zeros((BLOCK_N,), tl.float32), right)
    elif tl.min(pairs, 0) == pair:
        some = pairs < count
        value = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for begin in range(0, INNER, BLOCK_K):
            k = begin + tl.arange(0, BLOCK_K)
            deep = k < INNER
            at = inner + pairs[:, None] * INNER + k[None, :]
            rows = tl.load(at, some[:, None] & deep[None, :], 0.0)
            if scales is None:
                of = down_proj + (expert * INNER + k)[:, None] * HIDDEN + n[None, :]
                columns = tl.load(of, deep[:, None] & right[None, :], 0.0)
            else:
                columns = scaled_tile(
                    down_proj, scales, scales_2, expert, begin, k, n, deep, right,
                    INNER, HIDDEN, BLOCK, False, BLOCK_K,
                ).to(rows.dtype)  # fmt: skip
            value = tl.dot(rows, columns, value, input_precision="ieee")
        all_weights = tl.load(weights + every, same & (every < count), 0.0)
        value = value * tl.sum(all_weights, 1)[:, None]
        to = parts + pairs[:, None] * HIDDEN + n[None, :]
        tl.store(to, value, some[:, None] & right[None, :])


def route_launch(logits: Tensor, bias: Tensor, *how: Any) -> Launch:
    """Make the launch for the op's operands; its outputs are the op's results."""
    (N, X), names = logits.shape, ("groups", "kept_groups", "experts", "normalise", "factor")
    known = bind(moe_route, (logits, bias, *how))
    kernels = ("GROUPS", "KEPT", "CHOSEN", "NORMALISE", "FACTOR")
    constants = {"EXPERTS": X, "ROW": tile(X, 2), "ALWAYS": known["always"]}
    constants |= {to: known[name] for to, name in zip(kernels, names, strict=True)}
    constants["WIDE"] = tile(known["experts"] + known["always"], 2)
    results = empty_routes(logits, bias, *how)
    return Launch(route, (N,), (logits, bias), (), results, constants, warps=1)


def moe_route_launches(*operands: Any) -> Launches:
    """Make the launch for the op's operands."""
    launch = route_launch(*operands)
    return Launches((launch,), launch.outputs)


def columns_of_a_program(chosen: int, columns: int) -> int:
    """Choose 64, 32 or 16 columns, so that one token has programs for most multiprocessors.

    It is for plain weights: narrow tiles of fp8 or nvfp4 take far more instructions per byte.
    It does not depend on the number of tokens, so that neither does how a token's sums are rounded.
    """
    fits = (wide for wide in (64, 32) if chosen * cdiv(columns, wide) >= PROGRAMS)
    return next(fits, 16)


def moe_launches(*operands: Any) -> Launches:
    """Make the launches for the op's operands; their result [N, k, E] is summed over k."""
    known = bind(moe, operands)
    x, (N, k) = known["x"], known["ids"].shape
    if N > MAX_TOKENS:
        raise NotImplementedError(f"moe takes up to {MAX_TOKENS} tokens, not {N}")
    count, E, width = N * k, x.shape[1], known["gate_up_proj"].shape[2] // 2
    inner, parts = x.new_empty(count, width), known["weights"].new_empty(N, k, E)
    known |= {"count": count, "inner": inner, "gate_up": known["gate_up_proj"]}
    known |= {"CHOSEN": k, "WIDE": tile(k, 2), "HIDDEN": E, "INNER": width}
    known |= {"BLOCK_M": tile(N), "BLOCK_K": 64}

    def product(kernel: Any, weight: str, depth: int, columns: int, made: Any) -> Launch:
        scales, scales_2 = known[f"{weight}_scales"], known[f"{weight}_scales_2"]
        block = depth if scales is None else depth // scales.shape[1]  # inputs that share a scale
        wide = columns_of_a_program(k, columns) if scales is None else 64
        own = {"scales": scales, "scales_2": scales_2, "BLOCK": block, "BLOCK_N": wide}
        return Launch.by_name(kernel, (count, cdiv(columns, wide)), known | own, made)

    first = product(gate_and_up, "gate_up", E, width, {"inner": inner})
    return Launches((first, product(down, "down", width, E, {"parts": parts})), parts)


@by_kernels(moe_route)
def moe_route_triton(*operands: Any) -> tuple[Tensor, ...]:
    """Do moe_route on a GPU."""
    return route_launch(*operands).run()


@by_kernels(moe)
def moe_triton(x: Tensor, *operands: Any) -> Tensor:
    """Do moe on a GPU."""
    return moe_launches(x, *operands).run().sum(1).type_as(x)
