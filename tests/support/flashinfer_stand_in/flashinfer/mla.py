"""The one function of `flashinfer.mla` that engines call, with its contract, on any device."""

import torch
from torch import Tensor

calls = 0


def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    backend: str = "auto",
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None,
) -> Tensor:
    """Attends with query [B * T, H, C] to pages [pages, rows, C].

    Query t sees seq_lens - T + t + 1 rows.
    """
    global calls
    calls += 1
    assert cum_seq_lens_q is not None
    assert cum_seq_lens_q.dtype == torch.int32
    assert max_q_len is not None, "else the host would wait for the lengths"
    B, T, rows = len(cum_seq_lens_q) - 1, max_q_len, kv_cache.shape[1]
    assert cum_seq_lens_q.tolist() == [T * b for b in range(B + 1)]
    assert query.shape[0] == B * T
    C = query.shape[2]
    assert query.is_contiguous()
    assert kv_cache.is_contiguous()
    assert C == kv_cache.shape[2] == kv_lora_rank + qk_rope_head_dim
    assert qk_nope_head_dim > 0
    assert rows in (32, 64)
    assert (block_tables.dtype, seq_lens.dtype) == (torch.int32, torch.int32)
    assert (block_tables.shape[0], *seq_lens.shape) == (B, B)
    assert block_tables.shape[1] * rows == max_seq_len
    assert backend == "trtllm-gen"
    assert not workspace_buffer.any(), "zeros when it is first used, and this leaves them"
    latents = kv_cache[block_tables.long()].flatten(1, 2).float()  # [B, S, C]
    seen = seq_lens[:, None] - T + torch.arange(1, T + 1)
    there = torch.arange(max_seq_len) < seen[..., None]  # [B, T, S]
    asked = query.float().unflatten(0, (B, T))
    scores = torch.einsum("bthc,bsc->bths", asked, latents) * bmm1_scale
    weights = scores.masked_fill(~there[:, :, None], float("-inf")).softmax(-1)
    mixed = torch.einsum("bths,bsc->bthc", weights, latents[..., :kv_lora_rank]) * bmm2_scale
    return mixed.to(query.dtype).flatten(0, 1)
