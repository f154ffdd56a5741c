"""grouped_attention as an operator of the CPU's library."""

from typing import Any

from mtpbuild.plugins.cpu.onnx import emit
from mtpbuild.plugins.definition import bind
from mtpbuild.plugins.grouped_attention.op import grouped_attention
from mtpbuild.plugins.mla_attention.onnx import holds


def grouped_attention_cpu(*operands: Any) -> Any:
    known = bind(grouped_attention, operands)
    return emit(grouped_attention, known, **grouped_rows(known, int(known["q"].shape[3])))


def grouped_rows(known: dict[str, Any], width: int) -> dict[str, int]:
    """Return the attributes for rows of all groups' keys, then their values."""
    written = int(holds(known["cache"], known["fresh"]))
    return {"values": known["groups"] * width, "latent": width, "written": written}
