"""shaped_probs in Triton: a row's filtered distribution, without sorting the row.

A filter is a threshold, found by bisection over the bits of a float. A row is read some 30 times
for each filter, but only if its slot uses the filter.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mtpbuild.plugins.accept_rewind.triton import vocabulary_block, without
from mtpbuild.plugins.control_tensors import name_controls
from mtpbuild.plugins.launch import Launch, Launches, run_launches
from mtpbuild.plugins.shaped_probs.op import shaped_probs_op

ONE_BITS = tl.constexpr(0x3F800000)  # of the float 1.0: positive floats order as their bits do


@triton.jit
def weights_of(
    row, v, vocab, temperature, highest, early, bans,
    BANNED: tl.constexpr,
):  # fmt: skip
    """Return exponentials of the ids' logits relative to the largest; 0 for banned ids."""
    x = tl.load(row + v, v < vocab, float("-inf"))
    if early:
        x = without(x, v, bans, BANNED)
    return tl.exp(x / temperature - highest)


@triton.jit
def floor_of_row(
    row, vocab, t, highest, early, bans, k, limit, least,
    BANNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the smallest weight that top-k, top-p and min-p keep."""
    floor = 0.0
    if (k > 0) & (k < vocab):
        floor = _kth(row, vocab, t, highest, early, bans, k, BANNED, BLOCK)
    if limit < 1:
        floor = _nucleus(row, vocab, t, highest, early, bans, floor, limit, BANNED, BLOCK)
    return tl.maximum(floor, least)


@triton.jit
def _kth(
    row, vocab, t, highest, early, bans, k,
    BANNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the k-th largest weight: the largest bits that at least k weights reach."""
    low, high = 0, ONE_BITS + 1
    for _ in range(30):
        middle = (low + high) // 2
        count = 0
        for begin in range(0, vocab, BLOCK):
            v = begin + tl.arange(0, BLOCK)
            e = weights_of(row, v, vocab, t, highest, early, bans, BANNED)
            reached = (e.to(tl.int32, bitcast=True) >= middle) & (v < vocab)
            count += tl.sum(reached.to(tl.int32), 0)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle)
    return tl.cast(low, tl.float32, bitcast=True)


@triton.jit
def _nucleus(
    row, vocab, t, highest, early, bans, floor, limit,
    BANNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the smallest weight for which all larger ones sum to less than the share `limit`.

    Only weights from `floor` up count.
    """
    left = 0.0
    for begin in range(0, vocab, BLOCK):
        v = begin + tl.arange(0, BLOCK)
        e = weights_of(row, v, vocab, t, highest, early, bans, BANNED)
        left += tl.sum(tl.where(e >= floor, e, 0.0), 0)
    low, high = -1, ONE_BITS
    for _ in range(30):
        middle = (low + high) // 2
        better = 0.0
        for begin in range(0, vocab, BLOCK):
            v = begin + tl.arange(0, BLOCK)
            e = weights_of(row, v, vocab, t, highest, early, bans, BANNED)
            above = (e.to(tl.int32, bitcast=True) > middle) & (e >= floor)
            better += tl.sum(tl.where(above, e, 0.0), 0)
        low = tl.where(better < limit * left, low, middle)
        high = tl.where(better < limit * left, middle, high)
    return tl.maximum(floor, tl.cast(high, tl.float32, bitcast=True))


@triton.jit
def shape_row(
    logits, temperature, top_k, top_p, min_p,
    vocab,
    probs,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program r writes row slot * TOKENS + token of probs [B, TOKENS, vocab], the op's result."""
    r = tl.program_id(0)
    b = r // TOKENS
    row, to = logits + r.to(tl.int64) * vocab, probs + r.to(tl.int64) * vocab
    t = tl.load(temperature + b)
    sampled = t > 0
    t = tl.where(sampled, t, 1.0)
    top = float("-inf")
    for begin in range(0, vocab, BLOCK):
        v = begin + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.max(tl.load(row + v, v < vocab, float("-inf")), 0))
    highest = top / t
    floor = 0.0
    if sampled:
        floor = floor_of_row(
            row, vocab, t, highest, False, row,
            tl.load(top_k + b), tl.load(top_p + b), tl.load(min_p + b), 0, BLOCK,
        )  # fmt: skip
    norm = 0.0
    for begin in range(0, vocab, BLOCK):
        v = begin + tl.arange(0, BLOCK)
        e = weights_of(row, v, vocab, t, highest, False, row, 0)
        norm += tl.sum(tl.where(e >= floor, e, 0.0), 0)
    for begin in range(0, vocab, BLOCK):
        v = begin + tl.arange(0, BLOCK)
        e = weights_of(row, v, vocab, t, highest, False, row, 0)
        tl.store(to + v, tl.where(e >= floor, e / norm, 0.0), v < vocab)


def shaped_probs_launches(logits: Tensor, controls: Sequence[Tensor]) -> Launches:
    """Return the launch of shaped_probs."""
    B, T, V = logits.shape
    known: dict[str, Any] = {**name_controls(controls), "logits": logits, "vocab": V}
    known |= {"TOKENS": T, "BLOCK": vocabulary_block(V)}
    probs = logits.new_empty(B, T, V)
    return Launches((Launch.by_name(shape_row, (B * T,), known, {"probs": probs}, warps=8),), probs)


shaped_probs_triton = run_launches(shaped_probs_op, shaped_probs_launches, "logits")
