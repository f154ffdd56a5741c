"""Acceptance in every mode, slot by slot: strict (greedy or sampled), rejection, block, relaxed.

DESIGN 5 defines the modes, docs/acceptance.md too. Plain PyTorch that every target can trace;
`op.py` is the case that all slots are strict and greedy.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtpbuild.plugins.accept_rewind.block import verify_block
from mtpbuild.plugins.accept_rewind.branch import when
from mtpbuild.plugins.accept_rewind.distribution import Shaping, draw, shaped_probs

DRAFT, ACCEPT, RECOVER = 0, 1, 2  # purposes of `uniforms`; strict draws its target with DRAFT
# A block's verdict depends on all its drafts, so the numbers of those it drops are not unseen and
# can't serve again: draft k > 1 has a stream of its own, numbered by the block's first position.
BLOCK_DRAFT = 3
TOP = 5  # alternatives reported per row


@dataclass(frozen=True)
class Judging:
    """What the requests ask for, per slot, and the numbers they draw from."""

    shaping: Shaping  # [B] each
    rejection: Tensor  # [B] bool
    block: Tensor  # [B] bool: rejection judges the drafts together
    synthetic: Tensor  # [B, T] chance of draft j + 1 if those before it are kept; -1: off
    relaxed_topk: Tensor  # [B] int; 1 is strict
    relaxed_delta: Tensor  # [B]
    thinking_ids: Tensor  # [B, 2]: tokens that begin and end a thinking phase, -1 for none
    banned_ids: Tensor  # [B, N] tokens that can't be emitted .. ; -1 for none
    banned_until: Tensor  # [B] .. at positions before this one
    uniforms: Tensor  # [B, 3 + max(K - 1, 0), positions] per purpose and absolute position


@dataclass(frozen=True)
class Verdict:
    """T = K + 1 rows per slot."""

    tokens: Tensor  # [B, T] emitted, -1 beyond n
    n: Tensor  # [B] 1 .. num_drafts + 1; 0 if inactive
    lengths: Tensor  # [B] advanced by n
    logprobs: Tensor  # [B, T] of the emitted tokens, under the plain softmax
    margins: Tensor  # [B, T] of logits if greedy, else of the uniform to its cell's border
    thinking: Tensor  # [B] bool, after the emitted tokens
    top_ids: Tensor | None = None  # [B, T, TOP] most probable tokens of each row
    top_logprobs: Tensor | None = None  # [B, T, TOP] under the plain softmax


def accept_mixed(
    logits: Tensor,
    window: Tensor,
    num_drafts: Tensor,
    lengths: Tensor,
    active: Tensor,
    thinking: Tensor,
    draft_probs: Tensor,
    judging: Judging,
) -> Verdict:
    """logits [B, T, V] fp32; window [B, T]; draft_probs [B, K, V]: what each draft was drawn from.

    A draft that was an argmax has a point mass there, so that one rule covers both.
    """
    _, T, V = logits.shape
    row = torch.arange(T, device=window.device)
    at = lengths[:, None] + 1 + row  # the position that row j decides
    logprobs = logits.log_softmax(-1)  # as the model says it, whatever is banned
    logits = _without_banned(logits, at, judging)
    p = shaped_probs(logits, judging.shaping.rows(2))  # [B, T, V]
    numbers = judging.uniforms[:, :3].gather(2, at[:, None].expand(-1, 3, -1))  # [B, 3, T]
    real = row < num_drafts[:, None]  # [B, T]; the last row has no draft
    sampled = judging.shaping.temperature > 0
    operands = (p, window, draft_probs, real, numbers, judging.rejection, judging.block)
    drawn, cell, lucky = when(sampled.any(), _drawn, _nothing_drawn, operands)
    top = logits.topk(2, dim=-1).values
    target = torch.where(sampled[:, None], drawn, logits.argmax(-1))
    margins = torch.where(sampled[:, None], cell, top[..., 0] - top[..., 1])

    phases = _phases(window, thinking, judging.thinking_ids)  # [B, T]
    n = torch.ones_like(lengths)
    if T > 1:
        good = real & _accepted(p, window, target, numbers, lucky, phases, judging)
        n = torch.where(good[:, :-1], T - 1, row[:-1]).amin(-1) + 1
    n = torch.where(active, n, 0)

    final = (n - 1).clamp(min=0)[:, None]
    following = torch.cat([window[:, 1:], window[:, :1]], dim=1)
    tokens = torch.where(row < n[:, None] - 1, following, target)
    phase = phases.gather(1, final)[:, 0]
    after = _after(phase, tokens.gather(1, final)[:, 0], judging.thinking_ids)
    best = logprobs.topk(min(TOP, V), dim=-1)
    return Verdict(
        tokens=torch.where(row < n[:, None], tokens, -1),
        n=n,
        lengths=lengths + n,
        logprobs=logprobs.gather(-1, tokens.clamp(0, V - 1)[..., None])[..., 0],
        margins=margins,
        thinking=(active & after) | (~active & thinking),
        top_ids=best.indices,
        top_logprobs=best.values,
    )


def _without_banned(logits: Tensor, at: Tensor, judging: Judging) -> Tensor:
    """Logits [B, T, V] with -inf for what may not be emitted yet (min_tokens)."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    banned = (ids == judging.banned_ids[..., None]).any(1)  # [B, V]
    early = at < judging.banned_until[:, None]  # [B, T]
    return logits.masked_fill(early[..., None] & banned[:, None], -torch.inf)


def _drawn(
    p: Tensor,
    window: Tensor,
    draft_probs: Tensor,
    real: Tensor,
    numbers: Tensor,
    rejection: Tensor,
    block: Tensor,
) -> tuple[Tensor, ...]:
    """What sampling says of each row, three times [B, T].

    The token that the row emits if the step ends there; the distance of its number to the border of
    the token's cell; and whether rejection keeps the row's draft.
    """
    K, V = draft_probs.shape[1:]
    law, lucky = p, torch.zeros_like(real)
    if K:
        drafts = window[:, 1:].clamp(0, V - 1)[..., None]
        p_draft, q_draft = (x.gather(-1, drafts)[..., 0] for x in (p[:, :K], draft_probs))
        together = verify_block(p, window, draft_probs, real[:, :K])
        luck = numbers[:, ACCEPT, :K]
        # One number decides how many of a block are kept: those of later rows serve later steps.
        in_block = luck[:, :1] < together.at_least
        chosen = block[:, None]
        kept = (chosen & in_block) | (~chosen & (luck * q_draft < p_draft))
        lucky = torch.cat([kept, lucky[:, K:]], dim=1)
        # A rejected draft's row draws from what q has too little of.
        rest = torch.where(chosen[..., None], together.rest, p[:, :K] - draft_probs).clamp(min=0)
        short = (rejection[:, None] & real[:, :K])[..., None] & (rest.sum(-1, keepdim=True) > 0)
        law = torch.cat([torch.where(short, rest, p[:, :K]), p[:, K:]], dim=1)
    number = torch.where(rejection[:, None], numbers[:, RECOVER], numbers[:, DRAFT])
    drawn, cell = draw(law, number)
    return drawn, cell, lucky


def _nothing_drawn(
    p: Tensor, window: Tensor, draft_probs: Tensor, real: Tensor, *others: Tensor
) -> tuple[Tensor, ...]:
    return torch.zeros_like(window), torch.zeros_like(p[..., 0]), torch.zeros_like(real)


def _accepted(
    p: Tensor,
    window: Tensor,
    target: Tensor,
    numbers: Tensor,
    lucky: Tensor,
    phases: Tensor,
    judging: Judging,
) -> Tensor:
    """Whether each row's draft would be kept if all before it were [B, T]; the last has none."""
    following = torch.cat([window[:, 1:], window[:, :1]], dim=1)
    drafts = following.clamp(0, p.shape[-1] - 1)
    sampled = judging.shaping.temperature[:, None] > 0
    forced = judging.synthetic >= 0
    by_chance = judging.rejection[:, None] & sampled & ~forced
    near = _near(p, drafts, judging) & phases & ~sampled
    # Not torch.where: ONNX Runtime has no Where of bool. An id outside the vocabulary never counts.
    good = (by_chance & lucky) | (~by_chance & ~forced & ((drafts == target) | near))
    good = good | (forced & (numbers[:, ACCEPT] < judging.synthetic))
    return good & (drafts == following)


def _near(p: Tensor, drafts: Tensor, judging: Judging) -> Tensor:
    """Relaxed acceptance [B, T]: among the top k, and within delta of the most probable."""
    p_draft = p.gather(-1, drafts[..., None])  # [B, T, 1]
    ids = torch.arange(p.shape[-1], device=p.device)
    ahead = (p > p_draft) | ((p == p_draft) & (ids < drafts[..., None]))
    rank = ahead.sum(-1)
    gap = p.amax(-1) - p_draft[..., 0]
    wanted = judging.relaxed_topk[:, None]
    possible = p_draft[..., 0] > 0  # not banned
    return possible & (wanted > 1) & (rank < wanted) & (gap <= judging.relaxed_delta[:, None])


def _phases(window: Tensor, thinking: Tensor, marks: Tensor) -> Tensor:
    """[B, T]: whether row j's token is thought, given the window's tokens up to j."""
    phases = [thinking]
    for j in range(1, window.shape[1]):
        phases.append(_after(phases[-1], window[:, j], marks))
    return torch.stack(phases, dim=1)


def _after(phase: Tensor, token: Tensor, marks: Tensor) -> Tensor:
    return (phase | (token == marks[:, 0])) & (token != marks[:, 1])


def draft_number(judging: Judging, lengths: Tensor, k: int) -> Tensor:
    """[B, 1]: what draft k (from 1) behind `lengths` committed rows is drawn with."""
    shared = judging.uniforms[:, DRAFT].gather(1, lengths[:, None] + k)
    if k == 1:
        return shared
    own = judging.uniforms[:, BLOCK_DRAFT + k - 2].gather(1, lengths[:, None] + 1)
    return torch.where(judging.block[:, None], own, shared)
