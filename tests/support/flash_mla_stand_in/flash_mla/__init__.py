"""Stands in, in PyTorch, for the part of FlashMLA that engines call, if it is not installed."""

from dataclasses import dataclass

from torch import Tensor

from flash_mla._loader import get_ops


@dataclass
class FlashMLASchedMeta:
    """Holds how a call has divided rows among multiprocessors, for calls with the same lengths."""

    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None


def has_legacy() -> bool:
    return True


def get_mla_metadata(*_: object) -> tuple[FlashMLASchedMeta, None]:
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    softmax_scale: float | None = None,
    causal: bool = False,
    use_legacy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attends with q [B, T, H, C] to pages k_cache [pages, 64, 1, C]; fills an empty division."""
    assert use_legacy, "the others read chosen rows"
    held = tile_scheduler_metadata
    out, lse, held.tile_scheduler_metadata, held.num_splits = get_ops(use_legacy).dense_decode_fwd(
        q,
        k_cache,
        head_dim_v,
        cache_seqlens,
        block_table,
        softmax_scale,
        causal,
        held.tile_scheduler_metadata,
        held.num_splits,
    )
    return out, lse
