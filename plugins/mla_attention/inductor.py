"""mla_attention in AOTInductor: heads become rows, so products read the cache without a copy."""

from typing import Any

import torch
from torch import Tensor

from mtpbuild.plugins.definition import bind
from mtpbuild.plugins.mla_attention.op import floored_softmax, mla_attention, seen_apart
from mtpbuild.plugins.sparse_rows.op import chosen_mask

Pair = tuple[Tensor, Tensor]  # for the cache's rows, and for the fresh rows


def mla_attention_inductor(*operands: Any) -> Tensor:
    """Compute the reference's result without a head dimension.

    A head dimension would make the products copy the cache for each head.
    """
    known = bind(mla_attention, operands)
    q, cache, fresh, base, first, scale, kv_lora_rank, chosen = known.values()
    (B, H, T, C), S = q.shape, cache.shape[2]
    rows = (q * scale).reshape(B, H * T, C)
    old = cache[:, 0, :, :C]
    new = fresh[:, 0, :, :C]
    committed, visible = seen_apart(S, new.shape[1], base, first, T)  # [B, 1, S], [B, T, F]
    if chosen is not None:
        seen = chosen_mask(chosen, base, S, new.shape[1])
        committed, visible = seen[..., :S].repeat(1, H, 1), seen[..., S:]
    masks = committed, visible.repeat(1, H, 1)
    keys, values = (old, new), (old[..., :kv_lora_rank], new[..., :kv_lora_rank])
    return attend_apart(rows, keys, values, masks, q.dtype).reshape(B, H, T, kv_lora_rank)


def attend_apart(rows: Tensor, keys: Pair, values: Pair, masks: Pair, dtype: torch.dtype) -> Tensor:
    """Mix the values of the cache's and the fresh rows by one softmax, without joining the rows.

    rows: scaled queries. masks: which rows are seen. dtype: of the softmax.
    """
    scores = [
        (rows @ key_rows.mT).to(dtype).masked_fill(~seen, float("-inf"))
        for key_rows, seen in zip(keys, masks, strict=True)
    ]
    p = floored_softmax(torch.cat(scores, dim=-1)).type_as(rows)
    S = keys[0].shape[-2]
    return p[..., :S] @ values[0] + p[..., S:] @ values[1]
