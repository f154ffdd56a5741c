"""shaped_probs in Triton: a row's filtered distribution, without sorting the row.

A filter is a threshold, the bits of which are found `BITS` at a time: each launch tries 2^BITS
thresholds in all blocks of the vocabulary. Programs return at once if their slot has no filter.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpbuild.plugins.accept_rewind.triton import (
    best_launch,
    best_of_row,
    vocabulary_block,
    without,
)
from mtpbuild.plugins.launch import Launch, Launches, round_up_to_tile, run_launches
from mtpbuild.plugins.shaped_probs.op import shaped_probs

BITS = tl.constexpr(5)
TRIED = tl.constexpr(1 << BITS.value)
TURNS = tl.constexpr(30 // BITS.value)  # launches that find a threshold: from 0 to 1 are 30 bits
ONE_BITS = tl.constexpr(0x3F800000)  # the float 1.0; positive floats have the order of their bits
# A row's search: its largest logit, the threshold so far, what it has to keep, the last filter's.
TOP, LOW, WANTED, FLOOR = (tl.constexpr(i) for i in range(4))
PART = 256  # logits at a time, one of each thread, which has a sum for each threshold
BANS = ("lengths", "banned_ids", "banned_until")


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
def row_of(
    logits, r, lengths, banned_ids, banned_until, vocab, TOKENS: tl.constexpr, BANNED: tl.constexpr
):  # fmt: skip
    """Return row r of the logits, its slot's banned ids, and whether they are banned there."""
    row = logits + r.to(tl.int64) * vocab
    b = r // TOKENS
    bans, early = row, False
    if banned_ids is not None:
        bans = banned_ids + b * BANNED
        early = tl.load(lengths + b) + 1 + r % TOKENS < tl.load(banned_until + b)
    return row, bans, early


@triton.jit
def temperature_of(temperature, b):
    """Return the temperature of slot b, or 1 if it is greedy, and whether it samples."""
    t = tl.load(temperature + b)
    return tl.where(t > 0, t, 1.0), t > 0


@triton.jit
def is_used(sampled, k, limit, vocab, turn):
    """Return whether a row has the filter that a turn works for: first top-k, then top-p."""
    return sampled & tl.where(turn < TURNS, (k > 0) & (k < vocab), limit < 1)


@triton.jit
def bits_below(turn):
    """Return how many bits of a filter's threshold are found after a turn."""
    return BITS * (TURNS - 1 - turn + tl.where(turn < TURNS, 0, TURNS))


@triton.jit
def search_of_row(search, kept, r, sampled, k, limit, vocab, blocks, turn, BLOCKS: tl.constexpr):
    """Return a row's search after the turns before `turn`: TOP, LOW, WANTED and FLOOR.

    The last of these turns left its search and what it kept of each block [rows, blocks, TRIED].
    """
    of = search + r * 4
    last = turn - 1
    top, low = tl.load(of + TOP), tl.load(of + LOW).to(tl.int32, bitcast=True)
    wanted, floor = tl.load(of + WANTED), tl.load(of + FLOOR)
    if is_used(sampled, k, limit, vocab, last):
        n, i = tl.arange(0, TRIED), tl.arange(0, BLOCKS)[:, None]
        sums = tl.sum(tl.load(kept + (r * blocks + i) * TRIED + n[None, :], i < blocks, 0.0), 0)
        if last == TURNS:  # its first threshold keeps what top-k leaves
            wanted = limit * tl.sum(tl.where(n == 0, sums, 0.0), 0)
        enough = tl.sum((sums >= wanted).to(tl.int32), 0)
        low += tl.maximum(enough - 1, 0) << bits_below(last)
        if (turn == TURNS) | (turn == 2 * TURNS):
            floor = tl.maximum(floor, tl.minimum(low, ONE_BITS).to(tl.float32, bitcast=True))
            low = 0
    return top, low, wanted, floor


@triton.jit
def try_thresholds(
    logits, best, search, kept, lengths, temperature, top_k, top_p, banned_ids, banned_until,
    vocab, blocks, turn,
    new_search, new_kept,
    TOKENS: tl.constexpr, BANNED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Program (r, i) finds what block i of row r = slot * TOKENS + token keeps, by threshold.

    That is a number of weights in turns of top-k, and their sum in those of top-p. Turn 0 has the
    blocks of `best_of_block`, others the turn before.
    """
    r, i = tl.program_id(0), tl.program_id(1)
    b = r // TOKENS
    t, sampled = temperature_of(temperature, b)
    k, limit = tl.load(top_k + b), tl.load(top_p + b)
    used = is_used(sampled, k, limit, vocab, turn)
    if used | (i == 0):
        if best is not None:
            one = r + tl.arange(0, 1)
            top = tl.max(best_of_row(best, one, one >= 0, blocks, BLOCKS)[1], 0)
            low, wanted, floor = tl.full((), 0, tl.int32), k.to(tl.float32), 0.0
        else:
            top, low, wanted, floor = search_of_row(
                search, kept, r, sampled, k, limit, vocab, blocks, turn, BLOCKS
            )
        if i == 0:
            to = new_search + r * 4
            tl.store(to + TOP, top)
            tl.store(to + LOW, low.to(tl.float32, bitcast=True))
            tl.store(to + WANTED, wanted)
            tl.store(to + FLOOR, floor)
        if used:
            n = tl.arange(0, TRIED)
            to = new_kept + (r * blocks + i) * TRIED
            shift = bits_below(turn)
            same = turn < 0
            known = 0.0
            if kept is not None:
                last = (low >> (shift + BITS)) % TRIED  # the threshold of the turn before
                of = kept + (r * blocks + i) * TRIED + last
                two = last < TRIED - 1
                two = two & (turn != TURNS)
                known = tl.load(of, two, 0.0)
                same = two & (known == tl.load(of + 1, two, 0.0))
            if same:  # the block has nothing between this threshold and the next
                tl.store(to + n, known + tl.zeros((TRIED,), tl.float32))
            else:
                row, bans, early = row_of(
                    logits, r, lengths, banned_ids, banned_until, vocab, TOKENS, BANNED
                )
                least = (low + (n << shift)).to(tl.float32, bitcast=True)
                least = tl.maximum(floor, least)[:, None]
                begin = i * BLOCK
                if early:
                    sums = kept_of_block(
                        row, begin, vocab, t, top, True, bans, least, turn, BANNED, BLOCK, PART
                    )
                else:  # without a branch the loop has all its loads in flight
                    sums = kept_of_block(
                        row, begin, vocab, t, top, False, bans, least, turn, BANNED, BLOCK, PART
                    )
                tl.store(to + n, sums)


@triton.jit
def kept_of_block(
    row, begin, vocab, t, top, early, bans, least, turn,
    BANNED: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Return the number or, in turns of top-p, sum of a block's weights that reach `least`."""
    sums = tl.zeros((TRIED, PART), tl.float32)
    for first in tl.range(0, BLOCK, PART, loop_unroll_factor=8):
        v = begin + first + tl.arange(0, PART)
        e = weights_of(row, v, vocab, t, top, early, bans, BANNED)
        reached = tl.where(e[None, :] >= least, 1.0, 0.0)
        sums += reached * tl.where(turn < TURNS, 1.0, e)[None, :]  # two instructions for each
    return tl.sum(sums, 1)


@triton.jit
def share_of_block(
    logits, search, kept, window, lengths, temperature, top_k, top_p, min_p,
    banned_ids, banned_until,
    vocab, blocks,
    laws, shares,
    TOKENS: tl.constexpr, BANNED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, i) sums the weights of block i of row r = slot * TOKENS + token that are kept.

    laws [B * TOKENS, 2]: the row's largest logit and the smallest weight that filters keep. shares
    [B * TOKENS, blocks, 2]: the sum, and with a window the number of ids before the row's draft.
    """
    r, i = tl.program_id(0), tl.program_id(1)
    b, j = r // TOKENS, r % TOKENS
    t, sampled = temperature_of(temperature, b)
    k, limit = tl.load(top_k + b), tl.load(top_p + b)
    top, _, _, floor = search_of_row(
        search, kept, r, sampled, k, limit, vocab, blocks, 2 * TURNS, BLOCKS
    )
    floor = tl.where(sampled, tl.maximum(floor, tl.load(min_p + b)), 0.0)
    row, bans, early = row_of(logits, r, lengths, banned_ids, banned_until, vocab, TOKENS, BANNED)
    v = i * BLOCK + tl.arange(0, BLOCK)
    e = weights_of(row, v, vocab, t, top, early, bans, BANNED)
    to = shares + (r * blocks + i) * 2
    tl.store(to, tl.sum(tl.where(e >= floor, e, 0.0), 0))
    if window is not None:
        draft = draft_of_row(window, b, j, vocab, TOKENS)[0]
        draft_weight = weights_of(row, draft + tl.arange(0, 1), vocab, t, top, early, bans, BANNED)
        before = ((e > draft_weight) | ((e == draft_weight) & (v < draft))) & (v < vocab)
        tl.store(to + 1, tl.sum(before.to(tl.float32), 0))
    if i == 0:
        tl.store(laws + r * 2, top)
        tl.store(laws + r * 2 + 1, floor)


@triton.jit
def draft_of_row(window, b, j, vocab, TOKENS: tl.constexpr):
    """Return row j's draft, or 0 if it has none in the vocabulary, and whether it has one."""
    draft = tl.load(window + b * TOKENS + j + 1, j < TOKENS - 1, -1)
    valid = (draft >= 0) & (draft < vocab)
    return tl.where(valid, draft, 0), valid


@triton.jit
def sum_of_blocks(sums, r, blocks, BLOCKS: tl.constexpr, FIELDS: tl.constexpr):
    """Add row r's sums [rows, blocks, FIELDS] at this pointer."""
    i = tl.arange(0, BLOCKS)
    return tl.sum(tl.load(sums + (r * blocks + i) * FIELDS, i < blocks, 0.0), 0)


@triton.jit
def shape_block(
    logits, laws, shares, temperature,
    vocab, blocks,
    probs,
    TOKENS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, i) writes block i of row slot * TOKENS + token of probs, the op's result."""
    r, v = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, to = logits + r.to(tl.int64) * vocab, probs + r.to(tl.int64) * vocab
    t, _ = temperature_of(temperature, r // TOKENS)
    top, floor = tl.load(laws + r * 2), tl.load(laws + r * 2 + 1)
    e = weights_of(row, v, vocab, t, top, False, row, 0)
    norm = sum_of_blocks(shares, r, blocks, BLOCKS, 2)
    tl.store(to + v, tl.where(e >= floor, e / norm, 0.0), v < vocab)


def law_launches(logits: Tensor, known: dict[str, Any]) -> tuple[Launch, ...]:
    """Return the launches that find each row's law, from the best of its blocks to its shares.

    known: operands by name. Names of sizes, constants and results are added.
    """
    B, T, V = logits.shape
    bans = {name: known[name] for name in BANS if known[name] is not None}
    best = best_launch(logits, **bans)
    grid = best.grid
    block = vocabulary_block(V)
    known |= {"logits": logits, "vocab": V, "TOKENS": T, "BLOCK": block, "PART": min(block, PART)}
    known |= {"blocks": grid[1], "BLOCKS": round_up_to_tile(grid[1], 2)}
    known |= {"BANNED": known["banned_ids"].shape[1] if bans else 0}
    known |= {"best": best.outputs[0], "search": None, "kept": None}
    launches = [best]
    for turn in range(2 * TURNS.value):
        results = logits.new_empty(B * T, 4), logits.new_empty(*grid, TRIED.value)
        launch = Launch.by_name(try_thresholds, grid, known | {"turn": turn}, results, warps=8)
        launches.append(launch)
        known |= {"best": None, "search": results[0], "kept": results[1]}
    laws = logits.new_empty(B * T, 2), logits.new_empty(*grid, 2)
    launches.append(Launch.by_name(share_of_block, grid, known, laws, warps=8))
    known |= {"best": best.outputs[0], "laws": laws[0], "shares": laws[1]}
    return tuple(launches)


def shaped_probs_launches(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Launches:
    """Return the launches of shaped_probs."""
    known: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    known |= {"min_p": min_p, **dict.fromkeys(("window", *BANS))}
    launches = law_launches(logits, known)
    probs = torch.empty_like(logits)
    shape = Launch.by_name(shape_block, launches[-1].grid, known, (probs,), warps=8)
    return Launches((*launches, shape), probs)


shaped_probs_triton = run_launches(shaped_probs, shaped_probs_launches, "logits")
