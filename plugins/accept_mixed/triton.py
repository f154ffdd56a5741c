"""accept_mixed in Triton, in four launches.

The first summarises blocks of the vocabulary (as in `accept_rewind`), the second finds each row's
distribution (filters are thresholds, as in `shaped_probs`), the third draws each row's target
token, and the fourth judges each slot. The vocabulary is never sorted.
"""

from inspect import signature
from typing import Any

import torch
import triton
import triton.language as tl

from mtpbuild.plugins.accept_mixed.op import accept_mixed_op
from mtpbuild.plugins.accept_rewind.triton import best_launch, best_of_row, vocabulary_block
from mtpbuild.plugins.control_tensors import name_controls
from mtpbuild.plugins.definition import bind, empty_results
from mtpbuild.plugins.launch import Launch, Launches, round_up_to_tile, run_launches
from mtpbuild.plugins.shaped_probs.triton import floor_of_row, weights_of
from mtpbuild.runtime.contract.controls import ACCEPT, DRAFT, RECOVER

LOG_DRAFT, LOG_ACCEPT, LOG_RECOVER = (tl.constexpr(i) for i in (DRAFT, ACCEPT, RECOVER))
# A row's figures: how its logits become its distribution, and the values for its draft.
TOP, FLOOR, NORM, P_DRAFT, Q_DRAFT, NEAR, MARGIN, LSE = (tl.constexpr(i) for i in range(8))


@triton.jit
def law_of_row(
    logits, best, window, lengths, draft_probs,
    temperature, top_k, top_p, min_p, relaxed_topk, relaxed_delta, banned_ids, banned_until,
    vocab, blocks,
    figures, target,
    TOKENS: tl.constexpr, BANNED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program r finds the distribution of row slot * TOKENS + j, and its figures for the draft.

    p is weight / NORM where weight >= FLOOR, else 0. figures [B * TOKENS, 8] are named above;
    target [B * TOKENS] is the argmax.
    """
    r = tl.program_id(0)
    b, j = r // TOKENS, r % TOKENS
    one = r + tl.arange(0, 1)
    token, first, second, most, total = best_of_row(best, one, one >= 0, blocks, BLOCKS)
    token, first, second = tl.max(token, 0), tl.max(first, 0), tl.max(second, 0)
    lse = tl.max(most + tl.log(total), 0)

    row, bans = logits + r.to(tl.int64) * vocab, banned_ids + b * BANNED
    early = tl.load(lengths + b) + 1 + j < tl.load(banned_until + b)
    t = tl.load(temperature + b)
    sampled = t > 0
    t = tl.where(sampled, t, 1.0)
    floor = 0.0
    if sampled:
        floor = floor_of_row(
            row, vocab, t, first, early, bans,
            tl.load(top_k + b), tl.load(top_p + b), tl.load(min_p + b), BANNED, BLOCK,
        )  # fmt: skip

    draft = tl.load(window + b * TOKENS + j + 1, j < TOKENS - 1, -1)
    valid = (draft >= 0) & (draft < vocab)
    draft = tl.where(valid, draft, 0)
    x = tl.zeros((BLOCK,), tl.int64) + draft
    own = tl.max(weights_of(row, x, vocab, t, first, early, bans, BANNED), 0)
    kept, before = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, vocab, BLOCK):
        v = begin + tl.arange(0, BLOCK)
        e = weights_of(row, v, vocab, t, first, early, bans, BANNED)
        kept += tl.where(e >= floor, e, 0.0)
        before += ((e > own) | ((e == own) & (v < draft))).to(tl.int32)
    norm, rank = tl.sum(kept, 0), tl.sum(before, 0)
    p_draft = tl.where(valid & (own >= floor), own / norm, 0.0)
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
    tl.store(target + r, token)


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
def drawn_token(
    row, q, number, factor, excess,
    vocab, t, top, floor, norm, early, bans, BANNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the token that a number draws, and its margin, as `draw` does.

    The weights are p, or max(factor p - q, 0) if their sum, `excess`, is above 0.
    """
    short = excess > 0
    total = tl.where(short, excess, 1.0)
    x = number * total
    found, last, before, own, edge = vocab, 0, 0.0, 0.0, x
    for begin in range(0, vocab, BLOCK):
        if found == vocab:
            v = begin + tl.arange(0, BLOCK)
            p = weights_of(row, v, vocab, t, top, early, bans, BANNED)
            p = tl.where(p >= floor, p / norm, 0.0)
            if short:
                p = tl.maximum(factor * p - tl.load(q + v, v < vocab, 0.0), 0.0)
            border = before + tl.cumsum(p, 0)
            found = tl.min(tl.where((border > x) & (p > 0), v, vocab), 0)
            own += tl.sum(tl.where(v == found, p, 0.0), 0)
            edge += tl.sum(tl.where(v == found, border - x, 0.0), 0)
            last = tl.maximum(last, tl.max(tl.where(p > 0, v, 0), 0))
            before += tl.sum(p, 0)
    token = tl.minimum(found, last)  # rounding can carry x up to the total
    return token, tl.minimum(x - edge + own, edge - x) / total


@triton.jit
def draw_of_row(
    logits, figures, best_token, num_drafts, lengths, draft_probs,
    temperature, rejection, block, banned_ids, banned_until, uniforms,
    vocab, positions, streams,
    target, margins, chances,
    TOKENS: tl.constexpr, BANNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program r draws the token that row r emits if the step ends there, with its margin.

    chances [B * TOKENS, 2]: the weight c of the drafts before this row (see `verify_block`), and
    the sum of max(c p - q, 0) in this row; outside block mode the sum is that of c = 1.
    """
    r = tl.program_id(0)
    b, j = r // TOKENS, r % TOKENS
    row, bans = logits + r.to(tl.int64) * vocab, banned_ids + b * BANNED
    position = tl.load(lengths + b) + 1 + j
    early = position < tl.load(banned_until + b)
    t = tl.load(temperature + b)
    sampled = t > 0
    t = tl.where(sampled, t, 1.0)
    to = figures + r * 8
    top, floor, norm = tl.load(to + TOP), tl.load(to + FLOOR), tl.load(to + NORM)

    drafts = tl.load(num_drafts + b)
    weight = weight_of_block(to, j, drafts)
    factor = tl.where(tl.load(block + b) != 0, weight, 1.0)
    rejecting = tl.load(rejection + b) != 0
    q = draft_probs + (b * (TOKENS - 1) + j).to(tl.int64) * vocab
    excess = 0.0
    if rejecting & (j < drafts) & (j < TOKENS - 1):
        for begin in range(0, vocab, BLOCK):
            v = begin + tl.arange(0, BLOCK)
            p = weights_of(row, v, vocab, t, top, early, bans, BANNED)
            p = tl.where(p >= floor, p / norm, 0.0)
            excess += tl.sum(tl.maximum(factor * p - tl.load(q + v, v < vocab, 0.0), 0.0), 0)
    tl.store(chances + r * 2, weight)
    tl.store(chances + r * 2 + 1, excess)

    token, margin = tl.load(best_token + r), tl.load(to + MARGIN)
    if sampled:
        stream = tl.where(rejecting, LOG_RECOVER, LOG_DRAFT)
        number = uniforms + (b * streams + stream).to(tl.int64) * positions + position
        token, margin = drawn_token(
            row, q, tl.load(number), factor, excess,
            vocab, t, top, floor, norm, early, bans, BANNED, BLOCK,
        )  # fmt: skip
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
    own = tl.load(logits + at.to(tl.int64) * vocab + token, some, 0.0)
    tl.store(logprobs + at, own - tl.load(figures + at * 8 + LSE, some, 0.0), some)


def accept_mixed_launches(*operands: Any) -> Launches:
    """Return the launches of accept_mixed."""
    known = bind(accept_mixed_op, operands)
    known |= name_controls(known.pop("controls"))
    logits, bans = known["logits"], known["banned_ids"]
    B, T, V = logits.shape
    until = known["banned_until"]
    best = best_launch(logits, lengths=known["lengths"], banned_ids=bans, banned_until=until)
    blocks, (streams, positions) = best.grid[1], known["uniforms"].shape[1:]
    known |= {"vocab": V, "blocks": blocks, "streams": streams, "positions": positions}
    known |= {"TOKENS": T, "ROWS": round_up_to_tile(T, 2), "BANNED": bans.shape[1]}
    known |= {"BLOCK": vocabulary_block(V), "BLOCKS": round_up_to_tile(blocks, 2)}
    (known["best"],) = best.outputs
    best_token, figures = logits.new_empty(B * T, dtype=torch.int32), logits.new_empty(B * T, 8)
    law = Launch.by_name(law_of_row, (B * T,), known, (figures, best_token), warps=8)
    known |= {"figures": figures, "best_token": best_token}
    results = empty_results(accept_mixed_op, known)
    known |= {"target": torch.empty_like(best_token), "chances": logits.new_empty(B * T, 2)}
    drawn = known["target"], results[-1], known["chances"]
    draw = Launch.by_name(draw_of_row, (B * T,), known, drawn, warps=8)
    judge = Launch.by_name(verdict_of_mixed_slot, (B,), known, results[:-1])
    return Launches((best, law, draw, judge), results)


OPERANDS = (*signature(accept_mixed_op._init_fn).parameters,)
accept_mixed_triton = run_launches(accept_mixed_op, accept_mixed_launches, *OPERANDS)
