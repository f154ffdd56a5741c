"""Strict greedy acceptance in Triton: the best two logits per block, then the verdict."""

import triton
import triton.language as tl
from torch import Tensor

from mtpbuild.plugins.accept_rewind import op
from mtpbuild.plugins.accept_rewind.op import accept_best, accept_rewind, best_of_blocks
from mtpbuild.plugins.definition import bind, empty_results
from mtpbuild.plugins.launch import Launch, Launches, cdiv, round_up_to_tile, run_launches

LOWEST = tl.constexpr(op.LOWEST)


@triton.jit
def best_of_block(
    logits, lengths, banned_ids, banned_until,
    vocab,
    best,
    TOKENS: tl.constexpr, BANNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, i) summarises block i of row r = slot * TOKENS + token.

    best [B * TOKENS, blocks, 5] contains the largest and the second logit of tokens that are not
    banned, the largest of all, the sum of exponentials relative to it, and the id of the first of
    the five. Ties go to the lowest id.
    """
    r = tl.program_id(0)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + r.to(tl.int64) * vocab + v, v < vocab, float("-inf"))
    highest = tl.maximum(tl.max(x, 0), LOWEST)
    total = tl.sum(tl.exp(x - highest), 0)
    if banned_ids is not None:
        b = r // TOKENS
        if tl.load(lengths + b) + 1 + r % TOKENS < tl.load(banned_until + b):
            x = without(x, v, banned_ids + b * BANNED, BANNED)
    top = tl.max(x, 0)
    # NaN equals nothing. A row of NaN still gives a valid token id; its sums are NaN.
    where = tl.minimum(tl.min(tl.where(x == top, v, vocab), 0), vocab - 1)
    at = r * tl.num_programs(1) + tl.program_id(1)
    tl.store(best + at * 5, top)
    tl.store(best + at * 5 + 1, tl.max(tl.where(v == where, float("-inf"), x), 0))
    tl.store(best + at * 5 + 2, highest)
    tl.store(best + at * 5 + 3, total)
    tl.store(best + at * 5 + 4, where.to(tl.float32))


@triton.jit
def without(x, v, banned_ids, BANNED: tl.constexpr):
    """Set the logits x of banned ids among v to -inf."""
    for i in tl.static_range(BANNED):
        x = tl.where(v == tl.load(banned_ids + i), float("-inf"), x)
    return x


@triton.jit
def best_of_row(best, row, some, blocks, BLOCKS: tl.constexpr):
    """Join a row's blocks from `best_of_block`, for rows [R], of which `some` exist.

    Returns five tensors [R]: the best id, its logit and the second one, the largest of all logits,
    and the sum of exponentials relative to it.
    """
    i = tl.arange(0, BLOCKS)[None, :]
    at, there = best + (row[:, None] * blocks + i) * 5, some[:, None] & (i < blocks)
    top = tl.load(at, there, float("-inf"))
    where = tl.where(there, tl.load(at + 4, there, 0.0).to(tl.int32), 2147483647)
    first = tl.max(top, 1)
    token = tl.min(tl.where(top == first[:, None], where, 2147483647), 1)
    token = tl.minimum(token, tl.max(tl.where(there, where, 0), 1))  # for a row of NaN
    below = tl.load(at + 1, there, float("-inf"))
    second = tl.max(tl.where(where == token[:, None], below, top), 1)
    highest, sums = tl.load(at + 2, there, LOWEST), tl.load(at + 3, there, 0.0)
    maximum = tl.max(highest, 1)
    return token, first, second, maximum, tl.sum(sums * tl.exp(highest - maximum[:, None]), 1)


@triton.jit
def verdict_of_slot(
    best, window, num_drafts, lengths, active,
    blocks,
    tokens, num_tokens, new_lengths, logprobs, margins,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Program b judges all rows of slot b; its outputs are the op's results."""
    b = tl.program_id(0)
    j = tl.arange(0, ROWS)
    target, first, second, _, total = best_of_row(best, b * TOKENS + j, j < TOKENS, blocks, BLOCKS)
    drafts = TOKENS - 1
    following = tl.load(window + b * TOKENS + j + 1, j < drafts, -1)
    right = (following == target) & (j < tl.load(num_drafts + b))
    n = tl.min(tl.where(right | (j >= drafts), drafts, j), 0) + 1
    n = tl.where(tl.load(active + b) != 0, n, 0)
    to, some = b * TOKENS + j, j < TOKENS
    tl.store(tokens + to, tl.where(j < n, target, -1).to(tl.int64), some)
    tl.store(num_tokens + b, n.to(tl.int64))
    tl.store(new_lengths + b, tl.load(lengths + b) + n)
    tl.store(logprobs + to, -tl.log(tl.where(some, total, 1.0)), some)
    tl.store(margins + to, first - tl.maximum(second, LOWEST), some)


def vocabulary_block(vocab: int) -> int:
    """Return the number of logits that a program reads at a time."""
    return min(op.BLOCK, round_up_to_tile(vocab))


def best_launch(logits: Tensor, **bans: Tensor) -> Launch:
    """Return the launch that computes `best` [B, T, blocks, 5] from logits [B, T, V].

    bans: lengths, banned_ids and banned_until, to leave out banned tokens; or nothing.
    """
    B, T, V = logits.shape
    best = empty_results(best_of_blocks, {"logits": logits})
    known = dict.fromkeys(("lengths", "banned_ids", "banned_until")) | bans
    known |= {"BANNED": bans["banned_ids"].shape[1] if bans else 0, "TOKENS": T}
    known |= {"logits": logits, "vocab": V, "BLOCK": vocabulary_block(V)}
    return Launch.by_name(best_of_block, (B * T, cdiv(V, op.BLOCK)), known, (best,), warps=8)


def best_of_blocks_launches(logits: Tensor) -> Launches:
    """Return the launch of best_of_blocks."""
    launch = best_launch(logits)
    (best,) = launch.outputs
    return Launches((launch,), best)


def accept_best_launches(best: Tensor, *slots: Tensor) -> Launches:
    """Return the launch of accept_best."""
    B, T, blocks, _ = best.shape
    results = empty_results(accept_best, bind(accept_best, (best, *slots)))
    constants = {"TOKENS": T, "ROWS": round_up_to_tile(T, 2), "BLOCKS": round_up_to_tile(blocks, 2)}
    launch = Launch(verdict_of_slot, (B,), (best, *slots), (blocks,), results, constants)
    return Launches((launch,), results)


def accept_rewind_launches(logits: Tensor, *slots: Tensor) -> Launches:
    """Return the launches of accept_rewind."""
    first = best_launch(logits)
    second = accept_best_launches(*first.outputs, *slots)
    return Launches((first, *second.each), second.results)


accept_rewind_triton = run_launches(accept_rewind, accept_rewind_launches, "logits")
best_of_blocks_triton = run_launches(best_of_blocks, best_of_blocks_launches, "logits")
accept_best_triton = run_launches(accept_best, accept_best_launches, "best")
