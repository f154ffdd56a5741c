"""mla_attention as an operator of the CPU's library, one form for prompts and steps."""

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
    """Write one node. It sees by itself which rows count, so no mask is made."""
    rows = cache, fresh, base, first, chosen
    return Attention(q, *rows, scale=scale, **sizes(cache, fresh, kv_lora_rank))


def sizes(cache: Any, fresh: Any, kv_lora_rank: int) -> dict[str, int]:
    """Say how rows lie: one key for all heads, whose first numbers are the values."""
    return {"groups": 1, "values": 0, "latent": kv_lora_rank, "written": int(holds(cache, fresh))}
