"""rotary_rows as an operator of the CPU's library."""

from typing import Any

from onnxscript.onnx_opset import opset24 as op

from mtpbuild.plugins.contrib import FLOATS, INTS
from mtpbuild.plugins.cpu.onnx import operator

Places = operator(
    "Places",
    {
        **{"start": INTS, "active": "tensor(bool)", "inv_freq": FLOATS},
        **{"tokens": INTS, "end": INTS},
    },
    {"offset": 0, "scale": 0.0},
    optional=("active",),
    outputs=(FLOATS, FLOATS, INTS, INTS, INTS),
)


def rotary_rows_cpu(
    start: Any, active: Any, inv_freq: Any, tokens: Any, offset: int, end: Any, scale: float
) -> Any:
    """Emit one node; sizes may be numbers or values of the graph."""
    sizes = (op.Constant(value_int=x) if isinstance(x, int) else x for x in (tokens, end))
    return Places(start, active, inv_freq, *sizes, offset=offset, scale=scale)
