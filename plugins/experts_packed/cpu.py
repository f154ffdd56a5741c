"""experts_packed as an operator of the CPU's library."""

from typing import Any

from mtpbuild.plugins.cpu.onnx import operator
from mtpbuild.plugins.matmul_nbits.onnx import FLOATS, HALVES, WEIGHT

IDS = "tensor(int32)"
Experts = operator(
    "Experts",
    {
        **{"x": FLOATS, "weights": FLOATS, "ids": IDS},
        **{"gate_up": WEIGHT, "gate_up_scales": HALVES, "down": WEIGHT, "down_scales": HALVES},
    },
    optional=("gate_up_scales", "down_scales"),
)


def experts_packed_cpu(*operands: Any) -> Any:
    return Experts(*operands)
