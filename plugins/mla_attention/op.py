"""mla_attention: a few query tokens per slot attend to committed and fresh latent rows."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mtpbuild.plugins.definition import Node, define
from mtpbuild.plugins.sparse_rows.op import chosen_mask

FLOOR = 1e-32


def floored_softmax(scores: Tensor) -> Tensor:
    """Compute a softmax over the last axis with no weight below `FLOOR` times the largest.

    This is for CPUs. Smaller weights do not change an fp32 sum. But they are often subnormal
    numbers, on which an operation takes a CPU a hundred cycles: in a trained model's sharp
    attention they took half of a step's time. Masked scores (-inf) are raised, too, so masked rows
    must be finite.
    """
    least = scores.amax(-1, keepdim=True) + math.log(FLOOR)
    return torch.maximum(scores, least).softmax(-1)


def seen_apart(
    rows: int, fresh_rows: int, base: Tensor, first: Tensor, tokens: int
) -> tuple[Tensor, Tensor]:
    """Return the cache's rows that all tokens see [B, 1, S], the fresh rows of each [B, T, F]."""
    last = first[:, None] + torch.arange(tokens, device=base.device)
    old = (torch.arange(rows, device=base.device) < base[:, None])[:, None]
    return old, torch.arange(fresh_rows, device=base.device) <= last[..., None]


def seen_rows(rows: int, fresh_rows: int, base: Tensor, first: Tensor, tokens: int) -> Tensor:
    """Return which rows of the cache, then which fresh rows, each token sees: [B, T, S + F]."""
    old, new = seen_apart(rows, fresh_rows, base, first, tokens)
    return torch.cat([old.expand(-1, tokens, -1), new], dim=-1)


def holds_rows(cache: Any, fresh: Any) -> bool:
    """Return whether the fresh rows of an ONNX graph have just been written into this cache.

    They start at the slot's base. An idle slot's fresh rows are elsewhere, so its queries see its
    old rows instead; their result is not used.
    """
    writer = cache.producer()
    if writer is None:
        return False
    if writer.op_type == "TensorScatter":
        return writer.inputs[1] is fresh
    # Operators of the CPU's library that compute rows and write them.
    rows = writer.op_type.startswith(("LatentRows", "GroupedRows"))
    return rows and fresh.producer() is writer


def latent_layout(known: Mapping[str, Any]) -> dict[str, int]:
    """Return the node's attributes for rows of one key for all heads, whose start is its value."""
    written = holds_rows(known["cache"], known["fresh"])
    return {"groups": 1, "values": 0, "written": int(written)}


@define(
    lambda q, kv_lora_rank: q.new_empty(*q.shape[:3], kv_lora_rank),
    Node("Attention", {"kv_lora_rank": "latent"}, latent_layout),
)
def mla_attention(
    q: Tensor,
    cache: Tensor,
    fresh: Tensor,
    base: Tensor,
    first: Tensor,
    scale: float,
    kv_lora_rank: int,
    chosen: Tensor | None = None,
) -> Tensor:
    """Attend with all query heads to one latent head of keys and values (absorbed MLA).

    q [B, H, T, C] (latent part, then rotary part); cache [B, 1, S, C]; fresh [B, 1, F, C]; base and
    first [B] int. Query t of slot b sees the cache's rows j < base[b] and the fresh rows
    i <= first[b] + t. Returns the mixed latents [B, H, T, kv_lora_rank].

    chosen [B, T, k] int64: positions from `choose_rows`; each query sees only the rows there. Rows
    may then be wider than C.

    Rows of the cache from base on are masked, so it does not matter whether the fresh rows have
    been written there yet. In graphs of standard operators and by inductor on a CPU they have
    weight `FLOOR` and must be finite. Queries, cache and fresh rows have the same dtype.
    """
    cache, fresh = cache[..., : q.shape[-1]], fresh[..., : q.shape[-1]]
    (S, F), T = (cache.shape[2], fresh.shape[2]), q.shape[2]
    seen = seen_rows(S, F, base, first, T) if chosen is None else chosen_mask(chosen, base, S, F)
    scores = torch.cat([q @ cache.transpose(-1, -2), q @ fresh.transpose(-1, -2)], dim=-1)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    p = (scores.float() * scale).softmax(-1).type_as(q)
    o = p[..., :S] @ cache[..., :kv_lora_rank] + p[..., S:] @ fresh[..., :kv_lora_rank]
    return o.contiguous()
