"""grouped_rows, grouped_rows_write and grouped_attention_flat as operators of the CPU's library."""

from typing import Any

from onnxscript import ir

from mtpbuild.plugins.cpu.onnx import Attention, row_operators
from mtpbuild.plugins.grouped_attention.cpu import sizes
from mtpbuild.plugins.matmul_nbits.onnx import FLOATS

GROUPED_ROWS = row_operators(
    "GroupedRows",
    dict.fromkeys(("a", "q_norm", "k_norm", "cos", "sin"), FLOATS),
    {"heads": 0, "groups": 0, "width": 0, "epsilon": 0.0, "plus_one": 0},
    optional=("q_norm", "k_norm"),
)
SIZES = ("heads", "groups", "width", "epsilon", "plus_one")


def grouped_rows_cpu(
    a: Any, q_norm: Any, k_norm: Any, cos: Any, sin: Any, *how: Any
) -> tuple[Any, Any]:
    q, fresh, _ = grouped_rows_write_cpu(a, q_norm, k_norm, cos, sin, None, None, *how)
    return q, fresh


def grouped_rows_write_cpu(
    a: Any,
    q_norm: Any,
    k_norm: Any,
    cos: Any,
    sin: Any,
    cache: Any,
    start: Any,
    heads: int,
    groups: int,
    width: int,
    eps: float,
    plus_one: bool = False,
) -> Any:
    how = dict(zip(SIZES, (heads, groups, width, eps, int(plus_one)), strict=True))
    kind = ir.DataType.FLOAT if cache is None else cache.dtype
    return GROUPED_ROWS[kind](a, q_norm, k_norm, cos, sin, cache, start, **how)


def grouped_attention_flat_cpu(
    q: Any, cache: Any, fresh: Any, base: Any, first: Any, scale: float, heads: int, groups: int
) -> Any:
    how = sizes(cache, fresh, groups, int(q.shape[2]) // heads)
    return Attention(q, cache, fresh, base, first, scale=scale, heads=heads, **how)
