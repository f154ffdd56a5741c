"""kv_write in ONNX: TensorScatter, in place if one buffer is bound as input and output."""

from typing import Any

from onnxscript.onnx_opset import opset24 as op


def kv_write_onnx(cache: Any, rows: Any, start: Any) -> Any:
    return op.TensorScatter(cache, rows, start, axis=-2, mode="linear")
