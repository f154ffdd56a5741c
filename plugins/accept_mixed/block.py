"""Block verification: the drafts of a step are accepted or rejected together.

Sun et al., "Block Verification Accelerates Speculative Decoding" (ICLR 2025), algorithm 2; vLLM's
`rejection_sample_method: block`. The output has the target's distribution, and no rule with that
property accepts more drafts on average.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """How a slot's K drafts fare together."""

    at_least: Tensor  # [B, K] chance that drafts 0 .. j are all kept; falls with j
    rest: Tensor  # [B, K, V] weights of the token behind j kept drafts; negative counts as 0


def verify_block(p: Tensor, window: Tensor, draft_probs: Tensor, real: Tensor) -> Block:
    """Judge K drafts by the target's distribution per row p [B, K + 1, V] and by the drafts' own.

    draft_probs [B, K, V] is the latter; real [B, K] says which drafts there are.


    Weight c_j = min(c_{j-1} p(d_j) / q(d_j), 1) is the chance that a draft path deserves; a block
    of exactly j < m drafts is kept, if no longer one was, with chance S / (S + 1 - c_j), where
    S = sum max(c_j p - q, 0) over the next row; of all m real ones with chance c_m.
    The paper draws a number per length from the longest down. One number against the cumulated
    chances has the same law, and leaves the other positions' numbers unseen for later steps.
    """
    K, V = draft_probs.shape[1:]
    drafts = window[:, 1:].clamp(0, V - 1)[..., None]
    wanted = p[:, :K].gather(-1, drafts)[..., 0]
    offered = draft_probs.gather(-1, drafts)[..., 0].clamp(min=torch.finfo(p.dtype).tiny)
    valid = real & (drafts[..., 0] == window[:, 1:])
    ratio = torch.where(valid, wanted / offered, 0.0)
    weights, weight = [], torch.ones_like(ratio[:, 0])
    for j in range(K):
        weights.append(weight)  # of the j drafts before row j
        weight = (weight * ratio[:, j]).clamp(max=1)
    weights.append(weight)
    c = torch.stack(weights, dim=1)  # [B, K + 1]
    rest = c[:, :K, None] * p[:, :K] - draft_probs

    excess = rest.clamp(min=0).sum(-1)  # [B, K]
    room = excess + 1 - c[:, :K]
    stop = torch.where(room > 0, excess / torch.where(room > 0, room, 1.0), 1.0)
    whole = torch.cat([stop[:, 1:], c[:, K:]], dim=1)  # [B, K]: of j + 1 drafts
    last = real & ~torch.cat([real[:, 1:], torch.zeros_like(real[:, :1])], dim=1)
    exactly = torch.where(last, c[:, 1:], torch.where(real, whole, 0.0))
    missed = ones = torch.ones_like(c[:, 0])
    chances = []
    for j in reversed(range(K)):
        missed = missed * (ones - exactly[:, j])
        chances.append(ones - missed)
    return Block(torch.stack(chances[::-1], dim=1), rest)
