"""mla_attention as an operator of the CPU's library, for prompts and steps."""

from typing import Any

from mtpbuild.plugins.cpu.onnx import emit
from mtpbuild.plugins.definition import bind
from mtpbuild.plugins.mla_attention.onnx import holds
from mtpbuild.plugins.mla_attention.op import mla_attention


def mla_attention_cpu(*operands: Any) -> Any:
    """Emit one node; the operator finds the visible rows itself, so there is no mask."""
    known = bind(mla_attention, operands)
    return emit(mla_attention, known, **latent_rows(known))


def latent_rows(known: dict[str, Any]) -> dict[str, int]:
    """Return the attributes for rows of one key for all heads, whose first values are its value."""
    return {"groups": 1, "values": 0, "written": int(holds(known["cache"], known["fresh"]))}
