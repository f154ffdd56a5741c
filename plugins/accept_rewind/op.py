"""accept_rewind: from the logits of a window to the emitted tokens and the new lengths.

If a vocabulary is divided over ranks, each rank runs `best_of_blocks` on its own logits, a sum
collects the blocks, and `accept_best` judges the blocks of all ranks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpbuild.plugins.definition import Node, define

BLOCK = 4096  # logits per block: 32 blocks for a row of 129,280
LOWEST = -3.0e38  # finite: -inf minus -inf would be NaN


def empty_verdict(logits: Tensor, window: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
    """Return empty tensors like a verdict; logits may be replaced by `best_of_blocks` of them."""
    like = torch.empty_like
    floats = logits.new_empty(window.shape)
    return like(window), like(lengths), like(lengths), floats, like(floats)


@define(empty_verdict, Node("Accept"))
def accept_rewind(
    logits: Tensor, window: Tensor, num_drafts: Tensor, lengths: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Accept drafts by strict greedy acceptance (docs/acceptance.md); K = T - 1 drafts.

    logits [B, T, V] fp32; window [B, T]: the newest token, then drafts; num_drafts [B]: the number
    of real drafts; lengths [B]: committed rows; active [B] bool.

    Returns tokens [B, T] (-1 from n on), num_tokens n [B] (1 <= n <= num_drafts + 1; 0 if
    inactive), lengths + n [B], and for each row its target token's log-probability and its top-1
    margin. The tokens are the longest prefix of drafts that equal their target tokens, then the
    next target token; ties go to the lowest id. Only the length is rewound: later rows are garbage.
    """
    top = logits.topk(2, dim=-1).values
    logprobs = top[..., 0] - logits.logsumexp(-1)
    margins = top[..., 0] - top[..., 1]
    slots = window, num_drafts, lengths, active
    return *_judged(logits.argmax(-1), *slots), logprobs, margins


def _judged(
    target: Tensor, window: Tensor, num_drafts: Tensor, lengths: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, n and new lengths for each row's target token [B, T]."""
    T = window.shape[1]
    K = T - 1
    row = torch.arange(T, device=window.device)
    equal = (window[:, 1:] == target[:, :K]) & (row[:K] < num_drafts[:, None])
    mismatch = torch.where(equal, K, row[:K])
    n = torch.cat([mismatch, torch.full_like(window[:, :1], K)], -1).amin(-1) + 1
    n = torch.where(active, n, 0)
    return torch.where(row < n[:, None], target, -1), n, lengths + n


@define(lambda logits: logits.new_empty(*logits.shape[:-1], -(-logits.shape[-1] // BLOCK), 5))
def best_of_blocks(logits: Tensor) -> Tensor:
    """Summarise each block of `BLOCK` logits [B, T, V] fp32: [B, T, blocks, 5] fp32.

    The five are the largest and the second logit, the largest again (kernels leave banned tokens
    out of the first two), the sum of exponentials relative to it, and the id of the largest, which
    is exact in fp32. Ties go to the lowest id.
    """
    blocks = -(-logits.shape[-1] // BLOCK)
    size = logits.shape[-1] if blocks == 1 else BLOCK
    x = F.pad(logits, (0, blocks * size - logits.shape[-1]), value=-torch.inf)
    x = x.unflatten(-1, (blocks, size))
    top = x.topk(2, dim=-1).values
    at = x.argmax(-1)
    highest = top[..., 0].clamp(min=LOWEST)
    total = (x - highest[..., None]).exp().sum(-1)
    ids = at + size * torch.arange(blocks, device=at.device)
    return torch.stack([top[..., 0], top[..., 1], highest, total, ids.float()], -1)


@define(lambda best, window, lengths: empty_verdict(best, window, lengths))
def accept_best(
    best: Tensor, window: Tensor, num_drafts: Tensor, lengths: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Do `accept_rewind` with the blocks of all ranks [B, T, blocks, 5], in the order of ids."""
    top, second, highest, sums, _ = best.unbind(-1)
    first = top.argmax(-1, keepdim=True)
    margins = top.amax(-1) - top.scatter(-1, first, second.gather(-1, first)).amax(-1)
    maximum = highest.amax(-1)
    logprobs = top.amax(-1) - maximum - (sums * (highest - maximum[..., None]).exp()).sum(-1).log()
    slots = window, num_drafts, lengths, active
    return *_judged(best_token(best), *slots), logprobs, margins


def best_token(best: Tensor) -> Tensor:
    """Return the id [B, T] of each row's largest logit."""
    at = best[..., 0].argmax(-1, keepdim=True)
    return best[..., 4].gather(-1, at)[..., 0].long()
