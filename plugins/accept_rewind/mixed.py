"""Acceptance in every mode, slot by slot: strict (greedy or sampled), rejection and relaxed.

DESIGN 5 defines the modes. Plain PyTorch that every target can trace; `op.py` is the case that all
slots are strict and greedy.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtpbuild.plugins.accept_rewind.distribution import Shaping, draw, shaped_probs

DRAFT, ACCEPT, RECOVER = 0, 1, 2  # purposes of `uniforms`; strict draws its target with DRAFT


@dataclass(frozen=True)
class Judging:
    """What the requests ask for, per slot, and the numbers they draw from."""

    shaping: Shaping  # [B] each
    rejection: Tensor  # [B] bool
    relaxed_topk: Tensor  # [B] int; 1 is strict
    relaxed_delta: Tensor  # [B]
    thinking_ids: Tensor  # [B, 2]: tokens that begin and end a thinking phase, -1 for none
    uniforms: Tensor  # [B, 3, positions] per purpose and absolute position


@dataclass(frozen=True)
class Verdict:
    """T = K + 1 rows per slot."""

    tokens: Tensor  # [B, T] emitted, -1 beyond n
    n: Tensor  # [B] 1 .. num_drafts + 1; 0 if inactive
    lengths: Tensor  # [B] advanced by n
    logprobs: Tensor  # [B, T] of the emitted tokens, under the plain softmax
    margins: Tensor  # [B, T] of logits if greedy, else of the uniform to its cell's border
    thinking: Tensor  # [B] bool, after the emitted tokens


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
    real = row[: T - 1] < num_drafts[:, None]  # [B, K]
    p = shaped_probs(logits, judging.shaping.rows(2))  # [B, T, V]
    at = lengths[:, None] + 1 + row  # the position that row j decides
    numbers = judging.uniforms.gather(2, at[:, None].expand(-1, 3, -1))  # [B, 3, T]

    target, margins = _targets(logits, p, draft_probs, real, numbers, judging)
    phases = _phases(window, thinking, judging.thinking_ids)  # [B, T]
    n = torch.ones_like(lengths)
    if T > 1:
        good = real & _accepted(p, window, draft_probs, target, numbers, phases, judging)
        mismatch = torch.where(good, T - 1, row[: T - 1])
        n = mismatch.amin(-1) + 1
    n = torch.where(active, n, 0)

    final = (n - 1).clamp(min=0)[:, None]
    follow = torch.cat([window[:, 1:], window[:, :1]], dim=1)
    tokens = torch.where(row < n[:, None] - 1, follow, target)
    given = logits.gather(-1, tokens.clamp(0, V - 1)[..., None])[..., 0]
    phase = phases.gather(1, final)[:, 0]
    after = _after(phase, tokens.gather(1, final)[:, 0], judging.thinking_ids)
    return Verdict(
        tokens=torch.where(row < n[:, None], tokens, -1),
        n=n,
        lengths=lengths + n,
        logprobs=given - logits.logsumexp(-1),
        margins=margins,
        thinking=(active & after) | (~active & thinking),
    )


def _targets(
    logits: Tensor,
    p: Tensor,
    draft_probs: Tensor,
    real: Tensor,
    numbers: Tensor,
    judging: Judging,
) -> tuple[Tensor, Tensor]:
    """The token that each row emits if the step ends there, and its margin, both [B, T]."""
    K, rejecting = draft_probs.shape[1], judging.rejection[:, None]
    law = p
    if K:  # a rejected draft's row draws from what q has too little of
        q = torch.where((rejecting & real)[..., None], draft_probs, 0.0)
        rest = (p[:, :K] - q).clamp(min=0)
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p[:, :K])
        law = torch.cat([rest, p[:, K:]], dim=1)
    drawn, cell = draw(law, torch.where(rejecting, numbers[:, RECOVER], numbers[:, DRAFT]))
    sampled = judging.shaping.temperature[:, None] > 0
    top = logits.topk(2, dim=-1).values
    return (
        torch.where(sampled, drawn, logits.argmax(-1)),
        torch.where(sampled, cell, top[..., 0] - top[..., 1]),
    )


def _accepted(
    p: Tensor,
    window: Tensor,
    draft_probs: Tensor,
    target: Tensor,
    numbers: Tensor,
    phases: Tensor,
    judging: Judging,
) -> Tensor:
    """Whether each draft would be kept if all before it were: [B, K]."""
    K, V = draft_probs.shape[1:]
    drafts = window[:, 1:].clamp(0, V - 1)
    p_draft = p[:, :K].gather(-1, drafts[..., None])  # [B, K, 1]
    q_draft = draft_probs.gather(-1, drafts[..., None])[..., 0]
    sampled = judging.shaping.temperature[:, None] > 0
    by_chance = judging.rejection[:, None] & sampled
    lucky = numbers[:, ACCEPT, :K] * q_draft < p_draft[..., 0]
    near = _near(p[:, :K], drafts, p_draft, judging) & phases[:, :K] & ~sampled
    # Not torch.where: ONNX Runtime has no Where of bool. An id outside the vocabulary never counts.
    good = (by_chance & lucky) | (~by_chance & ((drafts == target[:, :K]) | near))
    return good & (drafts == window[:, 1:])


def _near(p: Tensor, drafts: Tensor, p_draft: Tensor, judging: Judging) -> Tensor:
    """Relaxed acceptance [B, K]: among the top k, and within delta of the most probable."""
    ids = torch.arange(p.shape[-1], device=p.device)
    ahead = (p > p_draft) | ((p == p_draft) & (ids < drafts[..., None]))
    rank = ahead.sum(-1)
    gap = p.amax(-1) - p_draft[..., 0]
    wanted = judging.relaxed_topk[:, None]
    return (wanted > 1) & (rank < wanted) & (gap <= judging.relaxed_delta[:, None])


def _phases(window: Tensor, thinking: Tensor, marks: Tensor) -> Tensor:
    """[B, T]: whether row j's token is thought, given the window's tokens up to j."""
    phases = [thinking]
    for j in range(1, window.shape[1]):
        phases.append(_after(phases[-1], window[:, j], marks))
    return torch.stack(phases, dim=1)


def _after(phase: Tensor, token: Tensor, marks: Tensor) -> Tensor:
    return (phase | (token == marks[:, 0])) & (token != marks[:, 1])
