"""take_rows as an operator of the CPU's library."""

from typing import Any

from onnxscript import ir

from mtpbuild.plugins.contrib import FLOATS, INTS
from mtpbuild.plugins.cpu.onnx import operator

Take = operator("Take", {"x": FLOATS, "start": INTS}, {"count": 0})
TakeInts = operator("TakeInts", {"x": INTS, "start": INTS}, {"count": 0}, outputs=(INTS,))


def take_rows_cpu(x: Any, start: Any, count: int) -> Any:
    return (Take if x.dtype == ir.DataType.FLOAT else TakeInts)(x, start, count=count)
