"""mla_attention as an operator of the CPU's library, for prompts and steps."""

from typing import Any

from mtpbuild.plugins.cpu.onnx import Attention
from mtpbuild.plugins.mla_attention.onnx import holds


def mla_attention_cpu(
    q: Any,
    cache: Any,
    fresh: Any,
    base: Any,
    first: Any,
    scale: float,
    kv_lora_rank: int,
    chosen: Any = None,
) -> Any:
    """Emit one node; the operator finds the visible rows itself, so there is no mask."""
    rows = cache, fresh, base, first, chosen
    return Attention(q, *rows, scale=scale, **sizes(cache, fresh, kv_lora_rank))


def sizes(cache: Any, fresh: Any, kv_lora_rank: int) -> dict[str, int]:
    """Return the attributes for rows of one key for all heads, whose first values are its value."""
    return {"groups": 1, "values": 0, "latent": kv_lora_rank, "written": int(holds(cache, fresh))}
