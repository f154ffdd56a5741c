"""kv_write in ONNX: TensorScatter, which ONNX Runtime does in place on a buffer bound twice."""

from typing import Any

from onnxscript.onnx_opset import opset24 as op


def kv_write_onnx(cache: Any, rows: Any, start: Any) -> Any:
    return op.TensorScatter(cache, rows, start, axis=-2, mode="linear")
