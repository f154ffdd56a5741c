"""accept_rewind as an operator of the CPU's library."""

from typing import Any

from mtpbuild.plugins.contrib import FLOATS, INTS
from mtpbuild.plugins.cpu.onnx import operator

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
