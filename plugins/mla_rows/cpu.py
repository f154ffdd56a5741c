"""mla_rows and mla_rows_write as an operator of the CPU's library."""

from typing import Any

from onnxscript import ir

from mtpbuild.plugins.contrib import FLOATS
from mtpbuild.plugins.cpu.onnx import row_operators

LATENT_ROWS = row_operators(
    "LatentRows",
    dict.fromkeys(("a", "kv_norm", "cos", "sin", "q_norm"), FLOATS),
    {"epsilon": 0.0, "interleaved": 0},
    optional=("q_norm",),
)


def mla_rows_cpu(
    a: Any, q_norm: Any, kv_norm: Any, cos: Any, sin: Any, eps: float, interleaved: bool
) -> tuple[Any, Any]:
    how = {"epsilon": eps, "interleaved": int(interleaved)}
    q, fresh, _ = LATENT_ROWS[ir.DataType.FLOAT](a, kv_norm, cos, sin, q_norm, None, None, **how)
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
    return LATENT_ROWS[cache.dtype](a, kv_norm, cos, sin, q_norm, cache, start, **how)
