"""moe_route as an operator of the CPU's library."""

from typing import Any

from mtpbuild.plugins.contrib import FLOATS
from mtpbuild.plugins.cpu.onnx import operator

Route = operator(
    "Route",
    {"logits": FLOATS, "bias": FLOATS},
    {"groups": 0, "kept": 0, "experts": 0, "normalise": 0, "factor": 0.0, "always": 0},
    outputs=(FLOATS, "tensor(int32)"),
)


def moe_route_cpu(
    logits: Any,
    bias: Any,
    groups: int,
    kept_groups: int,
    experts: int,
    normalise: bool,
    factor: float,
    always: int = 0,
) -> Any:
    how = {"groups": groups, "kept": kept_groups, "experts": experts, "always": always}
    return Route(logits, bias, **how, normalise=int(normalise), factor=factor)
