"""moe in Triton: routing, then two products over the tokens of each expert that any token chose.

Every pair of a token and its expert has its programs; the expert's first pair does all of its
tokens, the others leave at once. So a chosen expert's weights are read once, by whoever needs them,
and nothing is sorted or gathered.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpbuild.plugins.launch import Launch, by_kernels, cdiv, run, tile
from mtpbuild.plugins.matmul_scaled.triton import scaled_tile
from mtpbuild.plugins.moe.op import MAX_TOKENS, moe, moe_route


@triton.jit
def route(
    logits, bias,
    weights, ids,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, CHOSEN: tl.constexpr,
    NORMALISE: tl.constexpr, FACTOR: tl.constexpr, ROW: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program n chooses token n's experts. ROW and WIDE are EXPERTS and CHOSEN as powers of two."""
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
    to = n * CHOSEN + k
    tl.store(weights + to, weight * FACTOR, k < CHOSEN)
    tl.store(ids + to, chosen, k < CHOSEN)


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
    if tl.min(pairs, 0) == pair:
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
    if tl.min(pairs, 0) == pair:
        some = pairs < count
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        right = n < HIDDEN
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
        value = value * tl.load(weights + pairs, some, 0.0)[:, None]
        to = parts + pairs[:, None] * HIDDEN + n[None, :]
        tl.store(to, value, some[:, None] & right[None, :])


def route_launch(
    logits: Tensor,
    bias: Tensor,
    groups: int,
    kept_groups: int,
    experts: int,
    normalise: bool,
    factor: float,
) -> Launch:
    """Make the launch for the op's operands; its outputs are the op's results."""
    N, X = logits.shape
    weights = logits.new_empty(N, experts)
    constants = {
        **{"EXPERTS": X, "GROUPS": groups, "KEPT": kept_groups, "CHOSEN": experts},
        **{"NORMALISE": normalise, "FACTOR": factor, "ROW": tile(X, 2), "WIDE": tile(experts, 2)},
    }
    outputs = weights, torch.empty_like(weights, dtype=torch.int32)
    return Launch(route, (N,), (logits, bias), (), outputs, constants, warps=1)


def moe_launches(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_scales: Tensor | None = None,
    gate_up_scales_2: Tensor | None = None,
    down_scales: Tensor | None = None,
    down_scales_2: Tensor | None = None,
) -> tuple[Launch, Launch]:
    """Make the launches for the op's operands; the last one's output [N, k, E] is summed over k."""
    (N, k), E, width = ids.shape, x.shape[1], gate_up_proj.shape[2] // 2
    if N > MAX_TOKENS:
        raise NotImplementedError(f"moe takes up to {MAX_TOKENS} tokens, not {N}")
    count = N * k
    inner, parts = x.new_empty(count, width), weights.new_empty(N, k, E)
    tiles = {"BLOCK_M": tile(N), "BLOCK_N": 64, "BLOCK_K": 64}
    shape = {"CHOSEN": k, "WIDE": tile(k, 2), "HIDDEN": E, "INNER": width, **tiles}
    first = Launch(
        gate_and_up,
        (count, cdiv(width, 64)),
        (x, ids, gate_up_proj, gate_up_scales, gate_up_scales_2),
        (count,),
        (inner,),
        shape | {"BLOCK": block_size(E, gate_up_scales)},
    )
    second = Launch(
        down,
        (count, cdiv(E, 64)),
        (inner, weights, ids, down_proj, down_scales, down_scales_2),
        (count,),
        (parts,),
        shape | {"BLOCK": block_size(width, down_scales)},
    )
    return first, second


def block_size(inputs: int, scales: Tensor | None) -> int:
    """Inputs that share a scale: all of them, if there are no scales."""
    return inputs if scales is None else inputs // scales.shape[1]


@by_kernels(moe_route)
def moe_route_triton(*operands: Any) -> tuple[Tensor, ...]:
    """Do moe_route on a GPU."""
    return run([route_launch(*operands)])


@by_kernels(moe)
def moe_triton(x: Tensor, *operands: Any) -> Tensor:
    """Do moe on a GPU."""
    (parts,) = run(moe_launches(x, *operands))
    return parts.sum(1).type_as(x)
