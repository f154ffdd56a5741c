"""mla_packed as an operator of the CPU's library."""

from typing import Any

from mtpbuild.plugins.cpu.onnx import operator
from mtpbuild.plugins.matmul_nbits.onnx import FLOATS, HALVES, INTS, ROWS, WEIGHT
from mtpbuild.plugins.mla_attention.cpu import sizes

LatentAttention = operator(
    "LatentAttention",
    {
        **{"q": FLOATS, "w_uk": WEIGHT, "w_uk_scales": HALVES, "w_uv": WEIGHT},
        **{"w_uv_scales": HALVES, "cos": FLOATS, "sin": FLOATS},
        **{"cache": ROWS, "fresh": FLOATS, "base": INTS, "first": INTS, "chosen": INTS},
    },
    {"scale": 0.0, "groups": 0, "values": 0, "latent": 0, "written": 0, "N": 0, "interleaved": 0},
    optional=("w_uk_scales", "w_uv_scales", "chosen"),
)


def mla_packed_cpu(
    q: Any,
    w_uk: Any,
    w_uk_scales: Any,
    w_uv: Any,
    w_uv_scales: Any,
    cos: Any,
    sin: Any,
    cache: Any,
    fresh: Any,
    base: Any,
    first: Any,
    scale: float,
    kv_lora_rank: int,
    v_head_dim: int,
    interleaved: bool,
    chosen: Any = None,
) -> Any:
    rows = cache, fresh, base, first
    return LatentAttention(
        *(q, w_uk, w_uk_scales, w_uv, w_uv_scales, cos, sin, *rows, chosen),
        **sizes(cache, fresh, kv_lora_rank),
        scale=scale,
        N=v_head_dim,
        interleaved=int(interleaved),
    )
