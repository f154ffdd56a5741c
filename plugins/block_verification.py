"""Block verification: the drafts of a window are judged together."""

import torch
from torch import Tensor


def verify_block(
    p: Tensor, window: Tensor, draft_probs: Tensor, real: Tensor
) -> tuple[Tensor, Tensor]:
    """Judge K drafts as a block, by the target's distribution p [B, K + 1, V] and the drafts' q.

    This is algorithm 2 of Sun et al., "Block Verification Accelerates Speculative Decoding" (ICLR
    2025); vLLM's `rejection_sample_method: block`. The output has the target's distribution, and no
    rule with that property accepts more drafts on average.

    draft_probs [B, K, V]: the distributions q that the drafts were drawn from. real [B, K]: which
    drafts exist. Returns the probability [B, K] that drafts 0 .. j are all kept, which falls with
    j, and the weights [B, K, V] of the token after j kept drafts; negative weights count as 0.

    The first j drafts have the weight c_j = min(c_{j-1} p(d_j) / q(d_j), 1), with c_0 = 1. All m
    real drafts are kept with probability c_m. If they are not, shorter blocks are tried, the
    longest first: j drafts are kept with probability S / (S + 1 - c_j), where S is the sum of
    max(c_j p - q, 0) over the next row. The paper draws a number for each length. Comparing one
    number with the cumulative probabilities has the same distribution, and leaves the numbers of
    the other positions to later steps.
    """
    K, V = draft_probs.shape[1:]
    drafts = window[:, 1:].clamp(0, V - 1)[..., None]
    wanted = p[:, :K].gather(-1, drafts)[..., 0]
    offered = draft_probs.gather(-1, drafts)[..., 0].clamp(min=torch.finfo(p.dtype).tiny)
    valid = real & (drafts[..., 0] == window[:, 1:])
    ratio = torch.where(valid, wanted / offered, 0.0)
    weights = []
    weight = torch.ones_like(ratio[:, 0])
    for j in range(K):
        weights.append(weight)  # c_j, of the j drafts before row j
        weight = (weight * ratio[:, j]).clamp(max=1)
    weights.append(weight)
    c = torch.stack(weights, dim=1)  # [B, K + 1]
    rest = c[:, :K, None] * p[:, :K] - draft_probs

    excess = rest.clamp(min=0).sum(-1)  # [B, K]
    room = excess + 1 - c[:, :K]
    stop = torch.where(room > 0, excess / torch.where(room > 0, room, 1.0), 1.0)
    whole = torch.cat([stop[:, 1:], c[:, K:]], dim=1)  # [B, K]: for j + 1 drafts
    last = real & ~torch.cat([real[:, 1:], torch.zeros_like(real[:, :1])], dim=1)
    exactly = torch.where(last, c[:, 1:], torch.where(real, whole, 0.0))
    missed = ones = torch.ones_like(c[:, 0])
    chances = []
    for j in reversed(range(K)):
        missed = missed * (ones - exactly[:, j])
        chances.append(ones - missed)
    return torch.stack(chances[::-1], dim=1), rest
