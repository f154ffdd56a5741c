"""FlashMLA's attention as an operator that an engine's programs call: `--attention-backend`."""

from pathlib import Path

import torch
from torch import Tensor

from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.programs.attention_backends import KEPT, PAGE, Library, stream_of, table_of

WORKSPACE = 128 << 20  # bytes: a bound of its partial results, 17 MB and 131 kB for each slot of R1
LIBRARY = Library(
    name="FlashMLA",
    flag="flash-mla",
    function="flash_mla.flash_mla_with_kvcache",
    install="--no-deps sgl-flash-mla",  # it asks for a newer PyTorch than its code needs
    version="sgl-flash-mla 1.0.0",
    given=(
        *("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v"),
        *("tile_scheduler_metadata", "softmax_scale", "causal", "use_legacy"),
    ),
)


def check(folder: Path) -> None:
    """Raise an EngineError unless FlashMLA is here, with its kernels for Hopper."""
    LIBRARY.check(folder)
    from flash_mla import has_legacy

    if not has_legacy():
        raise EngineError(f"{folder}: this FlashMLA has no kernels for sm_90 that load")


# Where strides are fixed, AOTInductor copies an operand for each call that shares it: the lengths.
@torch.library.custom_op(
    "mtpbuild_flash_mla::mla_decode", mutates_args=(), tags=(torch.Tag.flexible_layout,)
)
def mla_decode(
    query: Tensor, cache: Tensor, lengths: Tensor, scale: float, first: bool, kv_lora_rank: int
) -> Tensor:
    """Attend to the latent rows of each slot, of which the last T are the queries' own.

    query [B, T, H, C], cache [B, 1, S, C] bfloat16, S in whole pages; lengths [B] int32 are rows in
    use. Query t of T sees the rows before lengths - T + t + 1. first: no call before had these
    lengths, so a kernel divides the rows among multiprocessors; calls behind it take its division.
    Returns [B, T, H, kv_lora_rank].
    """
    from flash_mla import get_mla_metadata

    B, _, S, C = cache.shape
    division = ("division", cache.device, stream_of(cache), *query.shape)
    if first:
        KEPT[division] = get_mla_metadata()[0]  # it is empty, and the call fills it
    result: Tensor = LIBRARY.find()(
        q=query,
        k_cache=cache.view(B * S // PAGE, PAGE, 1, C),
        block_table=table_of(cache),
        cache_seqlens=lengths,
        head_dim_v=kv_lora_rank,
        tile_scheduler_metadata=KEPT[division],
        softmax_scale=scale,
        causal=True,
        use_legacy=True,  # the kernels for Hopper, and the only ones that read every row
    )[0]
    return result


@mla_decode.register_fake
def _(
    query: Tensor, cache: Tensor, lengths: Tensor, scale: float, first: bool, kv_lora_rank: int
) -> Tensor:
    return query.new_empty(*query.shape[:3], kv_lora_rank)
