"""mla_attention in AOTInductor: heads become rows, so products read the cache where it is."""

import torch
from torch import Tensor

from mtpbuild.plugins.mla_attention.op import floored_softmax


def mla_attention_inductor(
    q: Tensor,
    cache: Tensor,
    fresh: Tensor,
    base: Tensor,
    first: Tensor,
    scale: float,
    kv_lora_rank: int,
) -> Tensor:
    """Computes the reference's result without a head dimension.

    A head dimension would make the products copy the cache for each head.
    """
    (B, H, T, C), S = q.shape, cache.shape[2]
    rows, old, new = (q * scale).reshape(B, H * T, C), cache[:, 0], fresh[:, 0]
    committed = torch.arange(S, device=q.device) < base[:, None]  # [B, S]
    last = first[:, None] + torch.arange(T, device=q.device)
    visible = torch.arange(new.shape[1], device=q.device) <= last[..., None]  # [B, T, F]
    scores = torch.cat(
        [
            (rows @ old.mT).masked_fill(~committed[:, None], float("-inf")),
            (rows @ new.mT).masked_fill(~visible.repeat(1, H, 1), float("-inf")),
        ],
        dim=-1,
    )
    p = floored_softmax(scores)
    o = p[..., :S] @ old[..., :kv_lora_rank] + p[..., S:] @ new[..., :kv_lora_rank]
    return o.reshape(B, H, T, kv_lora_rank)
