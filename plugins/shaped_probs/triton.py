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

ONE_BITS = tl.constexpr(0x3F800000)  # the float 1.0; positive floats have the order of their bits


@triton.jit
def weights_of(
    row, v, vocab, temperature, highest, early, bans,
    BANNED: tl.constexpr,
):  # fmt: skip
    """Return exp(logit / temperature - highest) of the ids v; 0 for banned ids."""
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
        floor = _threshold(row, vocab, t, highest, early, bans, 0.0, k, BANNED, BLOCK, True)
    if limit < 1:
        mass = limit * sum_of_row(row, vocab, t, highest, early, bans, floor, BANNED, BLOCK, False)
        floor = _threshold(row, vocab, t, highest, early, bans, floor, mass, BANNED, BLOCK, False)
    return tl.maximum(floor, least)


@triton.jit
def _threshold(
    row, vocab, t, highest, early, bans, floor, wanted,
    BANNED: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Return the largest threshold from `floor` up whose `sum_of_row` is at least `wanted`."""
    low, high = 0, ONE_BITS + 1
    for _ in range(30):
        middle = (low + high) // 2
        least = tl.maximum(floor, tl.cast(middle, tl.float32, bitcast=True))
        total = sum_of_row(row, vocab, t, highest, early, bans, least, BANNED, BLOCK, COUNTED)
        low = tl.where(total < wanted, low, middle)
        high = tl.where(total < wanted, middle, high)
    return tl.maximum(floor, tl.cast(low, tl.float32, bitcast=True))


@triton.jit
def sum_of_row(
    row, vocab, t, highest, early, bans, least,
    BANNED: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Return the sum of the weights that are at least `least`, or their number if COUNTED."""
    total = 0 if COUNTED else 0.0
    for begin in range(0, vocab, BLOCK):
        v = begin + tl.arange(0, BLOCK)
        e = weights_of(row, v, vocab, t, highest, early, bans, BANNED)
        reached = e >= least
        total += tl.sum(reached.to(tl.int32) if COUNTED else tl.where(reached, e, 0.0), 0)
    return total


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
    norm = sum_of_row(row, vocab, t, highest, False, row, floor, 0, BLOCK, False)
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
    return Launches((Launch.by_name(shape_row, (B * T,), known, (probs,), warps=8),), probs)


shaped_probs_triton = run_launches(shaped_probs_op, shaped_probs_launches, "logits")
