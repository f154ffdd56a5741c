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
    K, row = T - 1, torch.arange(T, device=window.device)
    shaping = judging.shaping.rows(2)
    p = shaped_probs(logits, shaping)  # [B, T, V]
    real = row[:K] < num_drafts[:, None]  # [B, K]
    drafts = window[:, 1:].clamp(0, V - 1)  # an id outside the vocabulary is never accepted

    # The token that each row emits if the step ends there.
    at = lengths[:, None] + 1 + row  # absolute position that row j decides
    numbers = judging.uniforms.gather(2, at[:, None].expand(-1, 3, -1))  # [B, 3, T]
    rejecting = judging.rejection[:, None]
    law = p
    if K:
        q = torch.where((rejecting & real)[..., None], draft_probs, 0.0)
        rest = (p[:, :K] - q).clamp(min=0)
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p[:, :K])
        law = torch.cat([rest, p[:, K:]], dim=1)
    number = torch.where(rejecting, numbers[:, RECOVER], numbers[:, DRAFT])
    drawn, cell = draw(law, number)
    sampled = judging.shaping.temperature[:, None] > 0
    target = torch.where(sampled, drawn, logits.argmax(-1))

    # Which drafts are accepted, each given the ones before it.
    phases = _phases(window, thinking, judging.thinking_ids)  # [B, T]
    n = torch.ones_like(lengths)
    if K:
        p_draft = p[:, :K].gather(-1, drafts[..., None])  # [B, K, 1]
        q_draft = draft_probs.gather(-1, drafts[..., None])[..., 0]
        equal = drafts == target[:, :K]
        lucky = numbers[:, ACCEPT, :K] * q_draft < p_draft[..., 0]
        near = _near(p[:, :K], drafts, p_draft, judging) & phases[:, :K] & ~sampled
        by_chance = rejecting & sampled
        good = (by_chance & lucky) | (
            ~by_chance & (equal | near)
        )  # bool Where: not in ONNX Runtime
        good = good & real & (drafts == window[:, 1:])
        mismatch = torch.where(good, K, row[:K])
        n = torch.cat([mismatch, torch.full_like(window[:, :1], K)], -1).amin(-1) + 1
    n = torch.where(active, n, 0)

    follow = torch.cat([window[:, 1:], window[:, :1]], dim=1)
    tokens = torch.where(row < n[:, None] - 1, follow, target)
    top = logits.topk(2, dim=-1).values
    given = logits.gather(-1, tokens.clamp(0, V - 1)[..., None])[..., 0]
    ends = phases.gather(1, (n - 1).clamp(min=0)[:, None])[:, 0]
    newest = tokens.gather(1, (n - 1).clamp(min=0)[:, None])[:, 0]
    after = _after(ends, newest, judging.thinking_ids)
    return Verdict(
        tokens=torch.where(row < n[:, None], tokens, -1),
        n=n,
        lengths=lengths + n,
        logprobs=given - logits.logsumexp(-1),
        margins=torch.where(sampled, cell, top[..., 0] - top[..., 1]),
        thinking=(active & after) | (~active & thinking),
    )


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
