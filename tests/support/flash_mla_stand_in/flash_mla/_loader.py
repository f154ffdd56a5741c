"""The one operator below FlashMLA's Python that engines reach, with its contract, on any device."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

calls = planned = 0


def dense_decode_fwd(
    q: Tensor,
    kcache: Tensor,
    head_size_v: int,
    seqlens_k: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    is_causal: bool,
    tile_scheduler_metadata: Tensor | None,
    num_splits: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attends with query t of T to seqlens_k - T + t + 1 rows.

    What divides the rows is here the lengths themselves, so that an old division is an error.
    """
    global calls, planned
    calls += 1
    (B, T, _, C), (pages, page, heads, width) = q.shape, kcache.shape
    assert is_causal
    assert (q.dtype, q.stride(-1), kcache.stride(-1)) == (kcache.dtype, 1, 1)
    assert (page, heads, width) == (64, 1, C)
    assert (seqlens_k.dtype, block_table.dtype) == (torch.int32, torch.int32)
    assert (*seqlens_k.shape, block_table.shape[0]) == (B, B)
    assert int(block_table.max()) < pages
    if tile_scheduler_metadata is None or num_splits is None:
        planned += 1
        tile_scheduler_metadata, num_splits = seqlens_k.clone(), seqlens_k.new_zeros(B + 1)
    assert torch.equal(tile_scheduler_metadata, seqlens_k), "a division of other lengths"
    latents = kcache[block_table.long()].flatten(1, 3).float()  # [B, S, C]
    seen = seqlens_k[:, None] - T + torch.arange(1, T + 1)
    there = torch.arange(latents.shape[1]) < seen[..., None]  # [B, T, S]
    scores = torch.einsum("bthc,bsc->bths", q.float(), latents) * softmax_scale
    scores = scores.masked_fill(~there[:, :, None], float("-inf"))
    mixed = torch.einsum("bths,bsc->bthc", scores.softmax(-1), latents[..., :head_size_v])
    lse = scores.logsumexp(-1).transpose(1, 2)
    return mixed.to(q.dtype), lse, tile_scheduler_metadata, num_splits


def get_ops(use_legacy: bool) -> Any:
    assert use_legacy
    return SimpleNamespace(dense_decode_fwd=dense_decode_fwd)
