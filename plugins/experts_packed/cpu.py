"""experts_packed as an operator of the CPU's library."""

from typing import Any

from mtpbuild.plugins.cpu.onnx import operator
from mtpbuild.plugins.matmul_nbits.onnx import BYTES, FLOATS, HALVES, INTS

Experts = operator(
    "Experts",
    {
        **{"x": FLOATS, "ids": INTS, "gate_up": BYTES, "gate_up_scales": HALVES},
        **{"down": BYTES, "down_scales": HALVES},
    },
)


def experts_packed_cpu(x: Any, ids: Any, *weights: Any) -> Any:
    return Experts(x, ids, *weights)
