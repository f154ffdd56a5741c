"""grouped_attention_flat as an operator of the CPU's library."""

from typing import Any

from mtpbuild.plugins.cpu.onnx import emit
from mtpbuild.plugins.definition import bind
from mtpbuild.plugins.grouped_attention.cpu import grouped_rows
from mtpbuild.plugins.grouped_rows.op import grouped_attention_flat


def grouped_attention_flat_cpu(*operands: Any) -> Any:
    known = bind(grouped_attention_flat, operands)
    width = int(known["q"].shape[2]) // known["heads"]
    return emit(grouped_attention_flat, known, **grouped_rows(known, width))
