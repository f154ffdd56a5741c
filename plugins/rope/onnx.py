"""rope in ONNX: the RotaryEmbedding operator of opset 23."""

from typing import Any

from onnxscript.onnx_opset import opset24 as op


def rope_onnx(x: Any, cos: Any, sin: Any, heads: int, interleaved: bool) -> Any:
    return op.RotaryEmbedding(x, cos, sin, interleaved=int(interleaved), num_heads=heads)
