"""mla_packed as an operator of the CPU's library."""

from typing import Any

from mtpbuild.plugins.cpu.onnx import emit
from mtpbuild.plugins.definition import bind
from mtpbuild.plugins.mla_attention.cpu import latent_rows
from mtpbuild.plugins.mla_packed.op import mla_packed


def mla_packed_cpu(*operands: Any) -> Any:
    known = bind(mla_packed, operands)
    return emit(mla_packed, known, **latent_rows(known))
