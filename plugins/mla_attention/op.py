"""mla_attention: a few query tokens per slot over the committed and the fresh latent rows."""

import math

import torch
from torch import Tensor

FLOOR = 1e-32


def floored_softmax(scores: Tensor) -> Tensor:
    """Take a softmax over the last axis where no weight is less than `FLOOR` of the largest.

    It is for a CPU. No fp32 sum notices such weights, but those of trained, sharp attention are
    often subnormal numbers, and a CPU takes a hundred cycles for an operation on one: they were
    half of a step's time. Masked scores (-inf) are raised too, so what they weigh must be finite.
    """
    least = scores.amax(-1, keepdim=True) + math.log(FLOOR)
    return torch.maximum(scores, least).softmax(-1)


@torch.library.custom_op("mtpbuild::mla_attention", mutates_args=())
def mla_attention(
    q: Tensor,
    cache: Tensor,
    fresh: Tensor,
    base: Tensor,
    first: Tensor,
    scale: float,
    kv_lora_rank: int,
    k_scale: Tensor | None = None,
) -> Tensor:
    """Attend to one latent head of keys and values with all query heads (absorbed MLA).

    q [B, H, T, C] (latent part, then rotary part); cache [B, 1, S, C]; fresh [B, 1, F, C]; base and
    first [B] int. Query t of slot b sees the cache's rows j < base[b] and the fresh rows
    i <= first[b] + t. Returns the mixed latents [B, H, T, kv_lora_rank].

    Rows of the cache from base on do not count (on a CPU they weigh `FLOOR` and must be finite), so
    it does not matter whether the fresh rows have been written there yet. Cache and fresh rows have
    one dtype; k_scale [1] fp32 is what fp8 rows are multiplied by. Source: DESIGN 3;
    spec/deepseek-v3.md section 2.2.
    """
    if k_scale is not None:
        cache, fresh = ((rows.float() * k_scale).type_as(q) for rows in (cache, fresh))
    (S, F), T = (cache.shape[2], fresh.shape[2]), q.shape[2]
    rows = torch.arange(S, device=q.device), torch.arange(F, device=q.device)
    old = (rows[0] < base[:, None])[:, None, None, :]
    last = first[:, None] + torch.arange(T, device=q.device)
    new = (rows[1] <= last[..., None])[:, None]
    scores = torch.cat(
        [
            (q @ cache.transpose(-1, -2)).masked_fill(~old, float("-inf")),
            (q @ fresh.transpose(-1, -2)).masked_fill(~new, float("-inf")),
        ],
        dim=-1,
    )
    p = (scores.float() * scale).softmax(-1).type_as(q)
    o = p[..., :S] @ cache[..., :kv_lora_rank] + p[..., S:] @ fresh[..., :kv_lora_rank]
    return o.contiguous()


mla_attention.register_fake(
    lambda q, cache, fresh, base, first, scale, kv_lora_rank, *_: q.new_empty(
        *q.shape[:3], kv_lora_rank
    )
)
