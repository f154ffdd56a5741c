"""accept_mixed in Triton.

The first launches find each row's distribution, as in `shaped_probs`. Then a program per row takes
its figures, programs per block sum what a rejection would draw from, a program per row draws its
target token, and one per slot judges. The vocabulary is never sorted.
"""

from inspect import signature
from typing import Any

import torch
import triton
import triton.language as tl

from mtpbuild.plugins.accept_mixed.op import accept_mixed_op
from mtpbuild.plugins.accept_rewind.triton import best_of_row
from mtpbuild.plugins.control_tensors import name_controls
from mtpbuild.plugins.definition import bind, empty_results
from mtpbuild.plugins.launch import Launch, Launches, round_up_to_tile, run_launches
from mtpbuild.plugins.shaped_probs.triton import (
    draft_of_row,
    law_launches,
    row_of,
    sum_of_blocks,
    temperature_of,
    weights_of,
)
from mtpbuild.runtime.contract.controls import ACCEPT, DRAFT, RECOVER

LOG_DRAFT, LOG_ACCEPT, LOG_RECOVER = (tl.constexpr(i) for i in (DRAFT, ACCEPT, RECOVER))
# A row's figures: how its logits become its distribution, and the values for its draft.
TOP, FLOOR, NORM, P_DRAFT, Q_DRAFT, NEAR, MARGIN, LSE = (tl.constexpr(i) for i in range(8))


@triton.jit
def law_of_row(
    logits, best, laws, shares, window, lengths, draft_probs,
    temperature, relaxed_topk, relaxed_delta, banned_ids, banned_until,
    vocab, blocks,
    figures, best_token,
    TOKENS: tl.constexpr, BANNED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Program r takes the figures of row slot * TOKENS + j.

    p is weight / NORM where weight >= FLOOR, else 0. figures [B * TOKENS, 8] are named above;
    best_token [B * TOKENS] is the argmax.
    """
    r = tl.program_id(0)
    b, j = r // TOKENS, r % TOKENS
    one = r + tl.arange(0, 1)
    token, first, second, highest, total = best_of_row(best, one, one >= 0, blocks, BLOCKS)
    token, first, second = tl.max(token, 0), tl.max(first, 0), tl.max(second, 0)
    lse = tl.max(highest + tl.log(total), 0)
    floor = tl.load(laws + r * 2 + 1)
    norm = sum_of_blocks(shares, r, blocks, BLOCKS, 2)
    rank = sum_of_blocks(shares + 1, r, blocks, BLOCKS, 2)

    row, bans, early = row_of(logits, r, lengths, banned_ids, banned_until, vocab, TOKENS, BANNED)
    t, sampled = temperature_of(temperature, b)
    draft, valid = draft_of_row(window, b, j, vocab, TOKENS)
    draft_weight = weights_of(row, draft + tl.arange(0, 1), vocab, t, first, early, bans, BANNED)
    draft_weight = tl.max(draft_weight, 0)
    p_draft = tl.where(valid & (draft_weight >= floor), draft_weight / norm, 0.0)
    q_draft = 0.0
    if j < TOKENS - 1:
        q_draft = tl.load(draft_probs + (b * (TOKENS - 1) + j).to(tl.int64) * vocab + draft)
    wanted = tl.load(relaxed_topk + b)
    gap = 1.0 / norm - p_draft
    near = (wanted > 1) & (rank < wanted) & (gap <= tl.load(relaxed_delta + b))
    to = figures + r * 8
    tl.store(to + TOP, first)
    tl.store(to + FLOOR, floor)
    tl.store(to + NORM, norm)
    tl.store(to + P_DRAFT, p_draft)
    tl.store(to + Q_DRAFT, q_draft)
    tl.store(to + NEAR, (near & ~sampled & (p_draft > 0)).to(tl.float32))
    tl.store(to + MARGIN, first - second)
    tl.store(to + LSE, lse)
    tl.store(best_token + r, token)


@triton.jit
def weight_of_block(figures, j, drafts):
    """Return the weight c of the j drafts before a row with these figures (see `verify_block`)."""
    weight = 1.0
    for i in range(j):
        of = figures - (j - i) * 8
        offered = tl.maximum(tl.load(of + Q_DRAFT), 1.1754944e-38)
        ratio = tl.where(i < drafts, tl.load(of + P_DRAFT) / offered, 0.0)
        weight = tl.minimum(weight * ratio, 1.0)
    return weight


@triton.jit
def rest_of(p, q, v, vocab, factor):
    """Return max(factor p - q, 0) of the ids v: what a rejected draft leaves."""
    return tl.maximum(factor * p - tl.load(q + v, v < vocab, 0.0), 0.0)


@triton.jit
def probs_of(
    logits, figures, lengths, temperature, banned_ids, banned_until, r, v, vocab,
    TOKENS: tl.constexpr, BANNED: tl.constexpr,
):  # fmt: skip
    """Return p of row r's ids v."""
    row, bans, early = row_of(logits, r, lengths, banned_ids, banned_until, vocab, TOKENS, BANNED)
    t, _ = temperature_of(temperature, r // TOKENS)
    to = figures + r * 8
    e = weights_of(row, v, vocab, t, tl.load(to + TOP), early, bans, BANNED)
    return tl.where(e >= tl.load(to + FLOOR), e / tl.load(to + NORM), 0.0)


@triton.jit
def rest_of_block(
    logits, figures, num_drafts, lengths, draft_probs,
    temperature, rejection, block, banned_ids, banned_until,
    vocab, blocks,
    factors, rests,
    TOKENS: tl.constexpr, BANNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, i) sums max(c p - q, 0) in block i of row r = slot * TOKENS + j.

    factors [B * TOKENS, 2]: the weight of the drafts before this row (see `verify_block`), and c,
    which is that in block mode and else 1. rests [B * TOKENS, blocks] are 0 without a draft, or
    without rejection.
    """
    r, i = tl.program_id(0), tl.program_id(1)
    b, j = r // TOKENS, r % TOKENS
    drafts = tl.load(num_drafts + b)
    weight = weight_of_block(figures + r * 8, j, drafts)
    factor = tl.where(tl.load(block + b) != 0, weight, 1.0)
    if i == 0:
        tl.store(factors + r * 2, weight)
        tl.store(factors + r * 2 + 1, factor)
    rest = 0.0
    if (tl.load(rejection + b) != 0) & (j < drafts) & (j < TOKENS - 1):
        v = i * BLOCK + tl.arange(0, BLOCK)
        p = probs_of(
            logits, figures, lengths, temperature, banned_ids, banned_until, r, v, vocab,
            TOKENS, BANNED,
        )  # fmt: skip
        q = draft_probs + (b * (TOKENS - 1) + j).to(tl.int64) * vocab
        rest = tl.sum(rest_of(p, q, v, vocab, factor), 0)
    tl.store(rests + r * blocks + i, rest)


@triton.jit
def draw_of_row(
    logits, figures, shares, factors, rests, best_token, lengths, draft_probs,
    temperature, rejection, banned_ids, banned_until, uniforms,
    vocab, blocks, positions, streams,
    target, margins, chances,
    TOKENS: tl.constexpr, BANNED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program r draws the token that row r emits if the step ends there, with its margin.

    It draws as `draw` does, from what a rejection leaves if that is above 0, else from p: it finds
    the block in which the number falls, then the token. chances [B * TOKENS, 2]: the weight of the
    drafts before this row, and the sum of its `rests`.
    """
    r = tl.program_id(0)
    b, j = r // TOKENS, r % TOKENS
    excess = sum_of_blocks(rests, r, blocks, BLOCKS, 1)
    tl.store(chances + r * 2, tl.load(factors + r * 2))
    tl.store(chances + r * 2 + 1, excess)
    token, margin = tl.load(best_token + r), tl.load(figures + r * 8 + MARGIN)
    if tl.load(temperature + b) > 0:
        i, short = tl.arange(0, BLOCKS), excess > 0
        at, there = r * blocks + i, i < blocks
        sums = tl.load(shares + at * 2, there, 0.0) / tl.load(figures + r * 8 + NORM)
        sums = tl.where(short, tl.load(rests + at, there, 0.0), sums)
        stream = tl.where(tl.load(rejection + b) != 0, LOG_RECOVER, LOG_DRAFT)
        number = uniforms + (b * streams + stream).to(tl.int64) * positions
        total = tl.where(short, excess, 1.0)
        x = tl.load(number + tl.load(lengths + b) + 1 + j) * total
        # Rounding can carry x up to the total, and over a block's last border: the last id is it.
        last = tl.max(tl.where(sums > 0, i, 0), 0)
        drawn_block = tl.min(tl.where((tl.cumsum(sums, 0) > x) & (sums > 0), i, last), 0)
        before = tl.sum(tl.where(i < drawn_block, sums, 0.0), 0)
        v = drawn_block * BLOCK + tl.arange(0, BLOCK)
        p = probs_of(
            logits, figures, lengths, temperature, banned_ids, banned_until, r, v, vocab,
            TOKENS, BANNED,
        )  # fmt: skip
        if short:
            q = draft_probs + (b * (TOKENS - 1) + j).to(tl.int64) * vocab
            p = rest_of(p, q, v, vocab, tl.load(factors + r * 2 + 1))
        border = before + tl.cumsum(p, 0)
        last = tl.max(tl.where(p > 0, v, 0), 0)
        token = tl.min(tl.where((border > x) & (p > 0), v, last), 0)
        edge = tl.sum(tl.where(v == token, border, 0.0), 0)
        below = edge - tl.sum(tl.where(v == token, p, 0.0), 0)
        margin = tl.maximum(tl.minimum(x - below, edge - x), 0.0) / total
    tl.store(target + r, token)
    tl.store(margins + r, margin)


@triton.jit
def verdict_of_mixed_slot(
    logits, figures, chances, target, window, num_drafts, lengths, active, thinking,
    temperature, rejection, block, synthetic, thinking_ids, uniforms,
    vocab, positions, streams,
    tokens, num_tokens, new_lengths, logprobs, new_thinking,
    TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program b keeps slot b's drafts until one fails, and writes the fields of `Verdict`."""
    b = tl.program_id(0)
    drafts, length = tl.load(num_drafts + b), tl.load(lengths + b)
    begins, ends = tl.load(thinking_ids + b * 2), tl.load(thinking_ids + b * 2 + 1)
    was_thinking = (tl.load(thinking + b) != 0).to(tl.int32)
    by_chance = (tl.load(rejection + b) != 0) & (tl.load(temperature + b) > 0)
    together = tl.load(block + b) != 0
    luck = uniforms + (b * streams + LOG_ACCEPT).to(tl.int64) * positions + length + 1

    # Find the longest block whose probability of being kept is above the block's one number.
    missed, whole = 1.0, 0
    for j in tl.static_range(TOKENS - 2, -1, -1):
        next_row = chances + (b * TOKENS + j + 1) * 2
        weight, excess = tl.load(next_row), tl.load(next_row + 1)
        room = excess + 1.0 - weight
        stop = tl.where(room > 0, excess / tl.where(room > 0, room, 1.0), 1.0)
        exactly = tl.where(j == drafts - 1, weight, tl.where(j < drafts, stop, 0.0))
        missed = missed * (1.0 - exactly)
        if (whole == 0) & (tl.load(luck) < 1.0 - missed):
            whole = j + 1

    kept, alive, phase = 0, 1, was_thinking
    for j in tl.static_range(TOKENS - 1):
        draft = tl.load(window + b * TOKENS + j + 1)
        figure = figures + (b * TOKENS + j) * 8
        number, rate = tl.load(luck + j), tl.load(synthetic + b * TOKENS + j)
        alone = number * tl.load(figure + Q_DRAFT) < tl.load(figure + P_DRAFT)
        kept_by_chance = (together & (j < whole)) | ((together == 0) & alone)
        near = (tl.load(figure + NEAR) > 0) & (phase > 0)
        same = draft == tl.load(target + b * TOKENS + j)
        good = (by_chance & kept_by_chance) | ((by_chance == 0) & (same | near))
        good = tl.where(rate >= 0, number < rate, good)
        good = good & (draft >= 0) & (draft < vocab) & (j < drafts)
        alive = alive & good.to(tl.int32)
        kept += alive
        after = (phase | (draft == begins).to(tl.int32)) & (draft != ends).to(tl.int32)
        phase = tl.where(alive > 0, after, phase)
    on = tl.load(active + b) != 0
    kept = tl.where(on, kept, 0)
    n = tl.where(on, kept + 1, 0)

    newest = tl.load(target + b * TOKENS + kept)
    after = (phase | (newest == begins).to(tl.int32)) & (newest != ends).to(tl.int32)
    tl.store(new_thinking + b, tl.where(on, after, was_thinking) > 0)
    tl.store(num_tokens + b, n.to(tl.int64))
    tl.store(new_lengths + b, length + n)
    i = tl.arange(0, ROWS)
    at, some = b * TOKENS + i, i < TOKENS
    token = tl.load(target + at, some, 0).to(tl.int64)
    token = tl.where(i < kept, tl.load(window + at + 1, i < TOKENS - 1, 0), token)
    tl.store(tokens + at, tl.where(i < n, token, -1), some)
    logit = tl.load(logits + at.to(tl.int64) * vocab + token, some, 0.0)
    tl.store(logprobs + at, logit - tl.load(figures + at * 8 + LSE, some, 0.0), some)


def accept_mixed_launches(*operands: Any) -> Launches:
    """Return the launches of accept_mixed."""
    known = bind(accept_mixed_op, operands)
    known |= name_controls(known.pop("controls"))
    logits = known["logits"]
    B, T, _ = logits.shape
    laws = law_launches(logits, known)
    grid, (streams, positions) = laws[-1].grid, known["uniforms"].shape[1:]
    known |= {"streams": streams, "positions": positions, "ROWS": round_up_to_tile(T, 2)}
    best_token, figures = logits.new_empty(B * T, dtype=torch.int32), logits.new_empty(B * T, 8)
    known |= {"figures": figures, "best_token": best_token}
    law = Launch.by_name(law_of_row, (B * T,), known, (figures, best_token))
    factors, rests = logits.new_empty(B * T, 2), logits.new_empty(grid)
    rest = Launch.by_name(rest_of_block, grid, known, (factors, rests), warps=8)
    known |= {"factors": factors, "rests": rests}
    results = empty_results(accept_mixed_op, known)
    known |= {"target": torch.empty_like(best_token), "chances": logits.new_empty(B * T, 2)}
    drawn = known["target"], results[-1], known["chances"]
    draw = Launch.by_name(draw_of_row, (B * T,), known, drawn, warps=8)
    judge = Launch.by_name(verdict_of_mixed_slot, (B,), known, results[:-1])
    return Launches((*laws, law, rest, draw, judge), results)


OPERANDS = (*signature(accept_mixed_op._init_fn).parameters,)
accept_mixed_triton = run_launches(accept_mixed_op, accept_mixed_launches, *OPERANDS)
