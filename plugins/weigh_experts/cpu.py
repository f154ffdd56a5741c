"""weigh_experts as an operator of the CPU's library."""

from typing import Any

from mtpbuild.plugins.contrib import FLOATS
from mtpbuild.plugins.cpu.onnx import operator
from mtpbuild.plugins.experts_packed.cpu import IDS

Weigh = operator("Weigh", {"x": FLOATS, "weights": FLOATS, "ids": IDS}, {"experts": 0, "always": 0})


def weigh_experts_cpu(x: Any, weights: Any, ids: Any, experts: int, always: int) -> Any:
    return Weigh(x, weights, ids, experts=experts, always=always)
