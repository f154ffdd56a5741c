"""causal_conv as an operator of the CPU's library."""

from typing import Any

from mtpbuild.plugins.cpu.onnx import operator
from mtpbuild.plugins.matmul_nbits.onnx import FLOATS

CausalConv = operator("CausalConv", {"x": FLOATS, "tail": FLOATS, "weight": FLOATS})


def causal_conv_cpu(x: Any, tail: Any, weight: Any) -> Any:
    return CausalConv(x, tail, weight)
