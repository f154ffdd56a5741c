"""accept_rewind as an operator of the CPU's library."""

from typing import Any

from mtpbuild.plugins.cpu.onnx import operator
from mtpbuild.plugins.matmul_nbits.onnx import FLOATS, INTS

Accept = operator(
    "Accept",
    {
        **{"logits": FLOATS, "window": INTS, "num_drafts": INTS, "lengths": INTS},
        **{"active": "tensor(bool)"},
    },
    outputs=(INTS, INTS, INTS, FLOATS, FLOATS),
)


def accept_rewind_cpu(*operands: Any) -> Any:
    return Accept(*operands)
