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


FloatExperts = operator(
    "FloatExperts", {"x": FLOATS, "ids": INTS, "gate_up": FLOATS, "down": FLOATS}
)


def experts_packed_cpu(x: Any, ids: Any, *weights: Any) -> Any:
    if weights[1] is None:
        return FloatExperts(x, ids, weights[0], weights[2])
    return Experts(x, ids, *weights)
