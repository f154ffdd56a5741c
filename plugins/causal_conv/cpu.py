"""causal_conv and last_inputs as operators of the CPU's library; a pass adds the input `begins`."""

from typing import Any

from mtpbuild.plugins.contrib import BOOLS, FLOATS, INTS
from mtpbuild.plugins.cpu.onnx import operator

CausalConv = operator(
    "CausalConv",
    {"x": FLOATS, "tail": FLOATS, "weight": FLOATS, "begins": BOOLS},
    optional=("begins",),
)
LastInputs = operator(
    "LastInputs",
    {"tail": FLOATS, "inputs": FLOATS, "n": INTS, "begins": BOOLS},
    optional=("begins",),
)


def causal_conv_cpu(x: Any, tail: Any, weight: Any) -> Any:
    return CausalConv(x, tail, weight)


def last_inputs_cpu(tail: Any, inputs: Any, n: Any) -> Any:
    return LastInputs(tail, inputs, n)
