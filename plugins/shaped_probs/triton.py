"""shaped_probs in Triton: a row's filtered distribution, without sorting the row.

A filter is a threshold, whose bits are found two at a time. A row is read 15 times for each filter,
but only if its slot uses the filter.
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
    row, v, vocab, temperature, top, early, bans,
    BANNED: tl.constexpr,
):  # fmt: skip
    """Return exp((logit - top) / temperature) of the ids v; 0 for banned ids.

    The weight of `top` is exactly 1. With logit / temperature - top / temperature it would not be,
    as the GPU's assembler joins a product and a difference, and rounds once.
    """
    x = tl.load(row + v, v < vocab, float("-inf"))
    if early:
        x = without(x, v, bans, BANNED)
    return tl.exp((x - top) / temperature)


@triton.jit
def floor_of_row(
    row, vocab, t, top, early, bans, k, limit, least,
    BANNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the smallest weight that top-k, top-p and min-p keep."""
    floor = 0.0
    if (k > 0) & (k < vocab):
        floor = _threshold(row, vocab, t, top, early, bans, 0.0, k, BANNED, BLOCK, True)
    if limit < 1:
        mass = limit * sum_of_row(row, vocab, t, top, early, bans, floor, BANNED, BLOCK)
        floor = _threshold(row, vocab, t, top, early, bans, floor, mass, BANNED, BLOCK, False)
    return tl.maximum(floor, least)


@triton.jit
def _threshold(
    row, vocab, t, top, early, bans, floor, wanted,
    BANNED: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Return the largest threshold from `floor` to 1 that keeps at least `wanted`.

    wanted: a sum of weights, or their number if COUNTED. Each pass over the row tries 4 thresholds,
    and finds 2 of the threshold's 30 bits.
    """
    low = 0
    for turn in range(15):
        step = 1 << (28 - 2 * turn)
        least = tl.maximum(floor, (low + step * tl.arange(0, 4)).to(tl.float32, bitcast=True))
        kept = tl.zeros((4, BLOCK), tl.int32 if COUNTED else tl.float32)
        for begin in range(0, vocab, BLOCK):
            v = begin + tl.arange(0, BLOCK)
            e = weights_of(row, v, vocab, t, top, early, bans, BANNED)[None, :]
            reached = e >= least[:, None]
            kept += reached.to(tl.int32) if COUNTED else tl.where(reached, e, 0.0)
        enough = (tl.sum(kept, 1) >= wanted).to(tl.int32)
        low += step * tl.maximum(tl.sum(enough, 0) - 1, 0)
    return tl.maximum(floor, tl.minimum(low, ONE_BITS).to(tl.float32, bitcast=True))


@triton.jit
def sum_of_row(
    row, vocab, t, top, early, bans, least,
    BANNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the sum of the weights that are at least `least`."""
    kept = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, vocab, BLOCK):
        v = begin + tl.arange(0, BLOCK)
        e = weights_of(row, v, vocab, t, top, early, bans, BANNED)
        kept += tl.where(e >= least, e, 0.0)
    return tl.sum(kept, 0)


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
    floor = 0.0
    if sampled:
        floor = floor_of_row(
            row, vocab, t, top, False, row,
            tl.load(top_k + b), tl.load(top_p + b), tl.load(min_p + b), 0, BLOCK,
        )  # fmt: skip
    norm = sum_of_row(row, vocab, t, top, False, row, floor, 0, BLOCK)
    for begin in range(0, vocab, BLOCK):
        v = begin + tl.arange(0, BLOCK)
        e = weights_of(row, v, vocab, t, top, False, row, 0)
        tl.store(to + v, tl.where(e >= floor, e / norm, 0.0), v < vocab)


def shaped_probs_launches(logits: Tensor, controls: Sequence[Tensor]) -> Launches:
    """Return the launch of shaped_probs."""
    B, T, V = logits.shape
    known: dict[str, Any] = {**name_controls(controls), "logits": logits, "vocab": V}
    known |= {"TOKENS": T, "BLOCK": vocabulary_block(V)}
    probs = logits.new_empty(B, T, V)
    return Launches((Launch.by_name(shape_row, (B * T,), known, (probs,), warps=8),), probs)


shaped_probs_triton = run_launches(shaped_probs_op, shaped_probs_launches, "logits")
