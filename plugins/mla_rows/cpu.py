"""mla_rows and mla_rows_write as an operator of the CPU's library."""

from typing import Any

from mtpbuild.plugins.cpu.onnx import operator
from mtpbuild.plugins.matmul_nbits.onnx import FLOATS, INTS

LatentRows = operator(
    "LatentRows",
    {
        **{"a": FLOATS, "kv_norm": FLOATS, "cos": FLOATS, "sin": FLOATS},
        **{"q_norm": FLOATS, "cache": FLOATS, "start": INTS},
    },
    {"epsilon": 0.0, "interleaved": 0},
    optional=("q_norm", "cache", "start"),
    outputs=(FLOATS, FLOATS, FLOATS),
)


def mla_rows_cpu(
    a: Any, q_norm: Any, kv_norm: Any, cos: Any, sin: Any, eps: float, interleaved: bool
) -> tuple[Any, Any]:
    how = {"epsilon": eps, "interleaved": int(interleaved)}
    q, fresh, _ = LatentRows(a, kv_norm, cos, sin, q_norm, None, None, **how)
    return q, fresh


def mla_rows_write_cpu(
    a: Any,
    q_norm: Any,
    kv_norm: Any,
    cos: Any,
    sin: Any,
    cache: Any,
    start: Any,
    eps: float,
    interleaved: bool,
) -> Any:
    how = {"epsilon": eps, "interleaved": int(interleaved)}
    return LatentRows(a, kv_norm, cos, sin, q_norm, cache, start, **how)
