"""mla_rows and mla_rows_write as an operator of the CPU's library."""

from typing import Any

from onnxscript import ir

from mtpbuild.plugins.cpu.onnx import row_operators
from mtpbuild.plugins.matmul_nbits.onnx import FLOATS

LATENT_ROWS = row_operators(
    "LatentRows",
    dict.fromkeys(("a", "q_norm", "kv_norm", "cos", "sin"), FLOATS),
    {"epsilon": 0.0, "interleaved": 0},
    optional=("q_norm",),
)


def mla_rows_cpu(
    a: Any, q_norm: Any, kv_norm: Any, cos: Any, sin: Any, eps: float, interleaved: bool
) -> tuple[Any, Any]:
    how = {"epsilon": eps, "interleaved": int(interleaved)}
    q, fresh, _ = LATENT_ROWS[ir.DataType.FLOAT](a, q_norm, kv_norm, cos, sin, None, None, **how)
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
    return LATENT_ROWS[cache.dtype](a, q_norm, kv_norm, cos, sin, cache, start, **how)
