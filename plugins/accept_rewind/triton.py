"""Strict greedy acceptance in Triton: the best two logits per block, then the verdict."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpbuild.plugins.accept_rewind.op import accept_rewind, empty_results
from mtpbuild.plugins.launch import Launch, Launches, by_kernels, cdiv, tile

BLOCK = 4096  # logits per program: 32 programs for a row of 129,280
LOWEST = tl.constexpr(-3.0e38)  # finite, so that no -inf is subtracted from itself


@triton.jit
def best_of_block(
    logits, lengths, banned_ids, banned_until,
    vocab,
    best, ids,
    TOKENS: tl.constexpr, BANNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, i) sums up block i of row r = slot * TOKENS + token.

    best [B * TOKENS, blocks, 4] holds the largest and second logit that may be emitted, then the
    largest of all and the sum of exponentials relative to it. ids [B * TOKENS, blocks] says where
    the largest is; ties go to the lowest.
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
    # A NaN equals nothing: a row of them names a token all the same, and says so by its sums.
    where = tl.minimum(tl.min(tl.where(x == top, v, vocab), 0), vocab - 1)
    at = r * tl.num_programs(1) + tl.program_id(1)
    tl.store(best + at * 4, top)
    tl.store(best + at * 4 + 1, tl.max(tl.where(v == where, float("-inf"), x), 0))
    tl.store(best + at * 4 + 2, highest)
    tl.store(best + at * 4 + 3, total)
    tl.store(ids + at, where)


@triton.jit
def without(x, v, banned_ids, BANNED: tl.constexpr):
    """Put -inf into the logits x of those ids v that can't be emitted yet."""
    for i in tl.static_range(BANNED):
        x = tl.where(v == tl.load(banned_ids + i), float("-inf"), x)
    return x


@triton.jit
def verdict_of_slot(
    best, ids, window, num_drafts, lengths, active,
    blocks,
    tokens, num_tokens, new_lengths, logprobs, margins,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Program b judges all rows of slot b; the outputs are the op's results."""
    b = tl.program_id(0)
    j, i = tl.arange(0, ROWS), tl.arange(0, BLOCKS)
    at = ((b * TOKENS + j) * blocks)[:, None] + i[None, :]
    there = (j < TOKENS)[:, None] & (i < blocks)[None, :]
    top = tl.load(best + at * 4, there, float("-inf"))
    where = tl.load(ids + at, there, 2147483647)
    first = tl.max(top, 1)
    target = tl.min(tl.where(top == first[:, None], where, 2147483647), 1)
    target = tl.minimum(target, tl.max(tl.where(there, where, 0), 1))  # of a row of NaN
    below = tl.load(best + at * 4 + 1, there, float("-inf"))
    second = tl.max(tl.where(where == target[:, None], below, top), 1)
    highest = tl.load(best + at * 4 + 2, there, LOWEST)
    sums = tl.load(best + at * 4 + 3, there, 0.0)
    total = tl.sum(sums * tl.exp(highest - tl.max(highest, 1)[:, None]), 1)

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
    """Logits that a program reads at a time."""
    return min(BLOCK, tile(vocab))


def best_launch(logits: Tensor, **bans: Tensor) -> Launch:
    """Make the launch that gives `best` and `ids` of logits [B, T, V].

    Banned tokens do not count, if `bans` has lengths, banned_ids and banned_until.
    """
    B, T, V = logits.shape
    blocks = cdiv(V, BLOCK)
    best = logits.new_empty(B * T, blocks, 4)
    ids = logits.new_empty(B * T, blocks, dtype=torch.int32)
    count = bans["banned_ids"].shape[1] if bans else 0
    constants = {"TOKENS": T, "BANNED": count, "BLOCK": vocabulary_block(V)}
    operands = logits, *map(bans.get, ("lengths", "banned_ids", "banned_until"))
    return Launch(best_of_block, (B * T, blocks), operands, (V,), (best, ids), constants, warps=8)


def accept_rewind_launches(logits: Tensor, *slots: Tensor) -> Launches:
    """Make the launches for the op's operands."""
    first = best_launch(logits)
    (B, T, _), blocks = logits.shape, first.grid[1]
    results = empty_results(logits, *slots)
    constants = {"TOKENS": T, "ROWS": tile(T, 2), "BLOCKS": tile(blocks, 2)}
    operands = *first.outputs, *slots
    second = Launch(verdict_of_slot, (B,), operands, (blocks,), results, constants)
    return Launches((first, second), results)


@by_kernels(accept_rewind)
def accept_rewind_triton(logits: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
    """Do the op on a GPU."""
    return accept_rewind_launches(logits.contiguous(), *slots).run()
