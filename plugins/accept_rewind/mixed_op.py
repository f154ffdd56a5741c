"""Acceptance in every mode and a draft's law as ops: for targets that have their kernels.

Elsewhere the plain PyTorch that they stand for is traced (`mixed.py`, `distribution.py`).
"""

import torch
from torch import Tensor

from mtpbuild.plugins.accept_rewind.distribution import Shaping, shaped_probs
from mtpbuild.plugins.accept_rewind.mixed import Judging, accept_mixed


@torch.library.custom_op("mtpbuild::accept_mixed", mutates_args=())
def accept_mixed_op(
    logits: Tensor,
    window: Tensor,
    num_drafts: Tensor,
    lengths: Tensor,
    active: Tensor,
    thinking: Tensor,
    draft_probs: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    rejection: Tensor,
    block: Tensor,
    synthetic: Tensor,
    relaxed_topk: Tensor,
    relaxed_delta: Tensor,
    thinking_ids: Tensor,
    banned_ids: Tensor,
    banned_until: Tensor,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`accept_mixed`: tokens, n, lengths, logprobs, thinking and margins of its verdict.

    draft_probs [B, K, V]; of a window without drafts anything, as it is not read.
    """
    judging = Judging(
        Shaping(temperature, top_k, top_p, min_p),
        rejection,
        block,
        synthetic,
        relaxed_topk,
        relaxed_delta,
        thinking_ids,
        banned_ids,
        banned_until,
        uniforms,
    )
    probs = draft_probs[:, : window.shape[1] - 1]
    v = accept_mixed(logits, window, num_drafts, lengths, active, thinking, probs, judging)
    return v.tokens, v.n, v.lengths, v.logprobs, v.thinking, v.margins


@accept_mixed_op.register_fake
def _(
    logits: Tensor,
    window: Tensor,
    num_drafts: Tensor,
    lengths: Tensor,
    active: Tensor,
    thinking: Tensor,
    *others: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    like, floats = torch.empty_like, logits.new_empty(logits.shape[:2])
    return like(window), like(lengths), like(lengths), floats, like(thinking), like(floats)


@torch.library.custom_op("mtpbuild::shaped_probs", mutates_args=())
def shaped_probs_op(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """`shaped_probs` of logits [B, T, V]; the parameters are [B]."""
    return shaped_probs(logits, Shaping(temperature, top_k, top_p, min_p).rows(2))


@shaped_probs_op.register_fake
def _(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    return torch.empty_like(logits)
