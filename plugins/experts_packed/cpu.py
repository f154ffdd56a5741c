"""experts_packed as an operator of the CPU's library."""

from typing import Any

from mtpbuild.plugins.contrib import BYTES, FLOATS, HALVES
from mtpbuild.plugins.cpu.onnx import operator

IDS = "tensor(int32)"
Experts = operator(
    "Experts",
    {
        **{"x": FLOATS, "ids": IDS, "gate_up": BYTES, "gate_up_scales": HALVES},
        **{"down": BYTES, "down_scales": HALVES, "weights": FLOATS},
    },
)


FloatExperts = operator(
    "FloatExperts", {"x": FLOATS, "ids": IDS, "gate_up": FLOATS, "down": FLOATS, "weights": FLOATS}
)


def experts_packed_cpu(
    x: Any,
    weights: Any,
    ids: Any,
    gate_up: Any,
    gate_up_scales: Any,
    down: Any,
    down_scales: Any,
) -> Any:
    if gate_up_scales is None:
        return FloatExperts(x, ids, gate_up, down, weights)
    return Experts(x, ids, gate_up, gate_up_scales, down, down_scales, weights)
