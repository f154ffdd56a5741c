"""FlashInfer's attention as an operator that an engine's programs call: `--attention-backend`."""

import torch
from torch import Tensor

from mtpbuild.runtime.programs.attention_backends import PAGE, Library, kept, stream_of, table_of

WORKSPACE = 128 << 20  # bytes: what FlashInfer's own tests and servers give it
LIBRARY = Library(
    name="FlashInfer",
    flag="flashinfer",
    function="flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla",
    install="flashinfer-python",
    version="0.7.2",
    given=(
        *("query", "kv_cache", "workspace_buffer", "qk_nope_head_dim", "kv_lora_rank"),
        *("qk_rope_head_dim", "block_tables", "seq_lens", "max_seq_len"),
        *("bmm1_scale", "bmm2_scale", "backend", "cum_seq_lens_q", "max_q_len"),
    ),
)
check = LIBRARY.check


# Where strides are fixed, AOTInductor copies an operand for each call that shares it: the lengths.
@torch.library.custom_op(
    "mtpbuild_flashinfer::mla_decode", mutates_args=(), tags=(torch.Tag.flexible_layout,)
)
def mla_decode(
    query: Tensor, cache: Tensor, lengths: Tensor, scale: float, nope: int, kv_lora_rank: int
) -> Tensor:
    """Attend to the latent rows of each slot, of which the last T are the queries' own.

    query [B, T, H, C], cache [B, 1, S, C] bfloat16, S in whole pages; lengths [B] int32 are rows in
    use. Query t of T sees the rows before lengths - T + t + 1. nope: a query's width without
    position, before it was absorbed. Returns [B, T, H, kv_lora_rank].
    """
    (B, _, S, C), device = cache.shape, cache.device
    # Kernels count in it: it begins as zeros, and one stream has it for itself.
    workspace = kept(
        ("workspace", device, stream_of(cache)),
        lambda: torch.zeros(WORKSPACE, dtype=torch.uint8, device=device),
    )
    # Said by lengths, a window is a sequence of T queries; given as [B, T, H, C] its mask is the
    # kernel's own affair, and has been wrong for some numbers of tokens and heads.
    T, H = query.shape[1:3]
    ends = kept(("queries", device, B, T), lambda: _ends(B, T, device))
    result: Tensor = LIBRARY.find()(
        query=query.reshape(B * T, H, C),
        kv_cache=cache.view(B * S // PAGE, PAGE, C),
        workspace_buffer=workspace,
        qk_nope_head_dim=nope,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=C - kv_lora_rank,
        block_tables=table_of(cache),
        seq_lens=lengths,
        max_seq_len=S,
        bmm1_scale=scale,
        bmm2_scale=1.0,
        backend="trtllm-gen",  # it plans nothing on the host, so that a CUDA graph can hold it
        cum_seq_lens_q=ends,
        max_q_len=T,  # without it the host would read the lengths
    )
    return result.view(B, T, H, kv_lora_rank)


@mla_decode.register_fake
def _(
    query: Tensor, cache: Tensor, lengths: Tensor, scale: float, nope: int, kv_lora_rank: int
) -> Tensor:
    return query.new_empty(*query.shape[:3], kv_lora_rank)


def _ends(slots: int, queries: int, device: torch.device) -> Tensor:
    """Says where each slot's queries end, behind a 0: [slots + 1] int32."""
    return torch.arange(slots + 1, dtype=torch.int32, device=device) * queries
