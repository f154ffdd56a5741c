"""accept_rewind: from the logits of a window to the emitted tokens and the new lengths."""

import torch
from torch import Tensor


@torch.library.custom_op("mtpbuild::accept_rewind", mutates_args=())
def accept_rewind(
    logits: Tensor, window: Tensor, num_drafts: Tensor, lengths: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Strict greedy acceptance (docs/acceptance.md); K = T - 1 drafts.

    logits [B, T, V] fp32; window [B, T]: the newest token, then drafts; num_drafts [B]: how many of
    them are real; lengths [B]: committed rows; active [B] bool.

    Returns tokens [B, T] (-1 beyond n), num_tokens n [B] (1 <= n <= num_drafts + 1; 0 if inactive),
    lengths + n [B], and per row the log-probability of its target token and its top-1 margin.
    The longest prefix of drafts equal to the target tokens is kept, and the target token after it;
    ties go to the lowest id. Rewinding is the new length alone: rows beyond it are garbage.
    """
    T = window.shape[1]
    K, row = T - 1, torch.arange(T, device=window.device)
    target = logits.argmax(-1)  # [B, T]
    equal = (window[:, 1:] == target[:, :K]) & (row[:K] < num_drafts[:, None])
    mismatch = torch.where(equal, K, row[:K])
    n = torch.cat([mismatch, torch.full_like(window[:, :1], K)], -1).amin(-1) + 1
    n = torch.where(active, n, 0)
    tokens = torch.where(row < n[:, None], target, -1)
    top = logits.topk(2, dim=-1).values
    logprobs = top[..., 0] - logits.logsumexp(-1)
    return tokens, n, lengths + n, logprobs, top[..., 0] - top[..., 1]


@accept_rewind.register_fake
def empty_results(
    logits: Tensor, window: Tensor, num_drafts: Tensor, lengths: Tensor, active: Tensor
) -> tuple[Tensor, ...]:
    """Make tensors like the op's results."""
    like, floats = torch.empty_like, logits.new_empty(window.shape)
    return like(window), like(lengths), like(lengths), floats, like(floats)
