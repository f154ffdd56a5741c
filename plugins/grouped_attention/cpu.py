"""grouped_attention as an operator of the CPU's library."""

from typing import Any

from mtpbuild.plugins.cpu.onnx import Attention
from mtpbuild.plugins.mla_attention.onnx import holds


def grouped_attention_cpu(
    q: Any, cache: Any, fresh: Any, base: Any, first: Any, scale: float, groups: int
) -> Any:
    """Write one node: a row has all groups' keys, then their values."""
    width, written = int(q.shape[3]), int(holds(cache, fresh))
    sizes = {"groups": groups, "values": groups * width, "latent": width, "written": written}
    return Attention(q, cache, fresh, base, first, scale=scale, **sizes)
