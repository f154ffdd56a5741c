"""grouped_attention as an operator of the CPU's library."""

from typing import Any

from mtpbuild.plugins.cpu.onnx import Attention
from mtpbuild.plugins.mla_attention.onnx import holds


def grouped_attention_cpu(
    q: Any, cache: Any, fresh: Any, base: Any, first: Any, scale: float, groups: int
) -> Any:
    how = sizes(cache, fresh, groups, int(q.shape[3]))
    return Attention(q, cache, fresh, base, first, scale=scale, **how)


def sizes(cache: Any, fresh: Any, groups: int, width: int) -> dict[str, int]:
    """Return the attributes for rows of all groups' keys, then their values."""
    written = int(holds(cache, fresh))
    return {"groups": groups, "values": groups * width, "latent": width, "written": written}
