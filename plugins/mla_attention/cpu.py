"""mla_attention as an operator of the CPU's library, one form for prompts and steps."""

from typing import Any

from mtpbuild.plugins.cpu.onnx import operator
from mtpbuild.plugins.matmul_nbits.onnx import FLOATS, INTS
from mtpbuild.plugins.mla_attention.onnx import holds

LatentAttention = operator(
    "LatentAttention",
    {"q": FLOATS, "cache": FLOATS, "fresh": FLOATS, "base": INTS, "first": INTS},
    {"scale": 0.0, "latent": 0, "written": 0},
)


def mla_attention_cpu(
    q: Any, cache: Any, fresh: Any, base: Any, first: Any, scale: float, kv_lora_rank: int
) -> Any:
    """Write one node. It sees by itself which rows count, so no mask is made."""
    sizes = {"scale": scale, "latent": kv_lora_rank, "written": int(holds(cache, fresh))}
    return LatentAttention(q, cache, fresh, base, first, **sizes)
