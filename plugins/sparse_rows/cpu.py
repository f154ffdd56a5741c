"""index_keys and choose_rows as operators of the CPU's library."""

from typing import Any

from mtpbuild.plugins.contrib import FLOATS, INTS, ROWS
from mtpbuild.plugins.cpu.onnx import operator

IndexKeys = operator(
    "IndexKeys",
    dict.fromkeys(("a", "weight", "bias", "cos", "sin"), FLOATS),
    {"epsilon": 0.0, "interleaved": 0},
)
ChooseRows = operator(
    "ChooseRows",
    {
        **dict.fromkeys(("q", "weights", "cos", "sin"), FLOATS),
        **{"cache": ROWS, "fresh": FLOATS, "base": INTS, "first": INTS},
    },
    {"count": 0, "interleaved": 0},
    outputs=(INTS,),
)


def index_keys_cpu(
    a: Any, weight: Any, bias: Any, cos: Any, sin: Any, eps: float, interleaved: bool
) -> Any:
    return IndexKeys(a, weight, bias, cos, sin, epsilon=eps, interleaved=int(interleaved))


def choose_rows_cpu(*operands: Any) -> Any:
    *rows, count, interleaved = operands
    return ChooseRows(*rows, count=count, interleaved=int(interleaved))
