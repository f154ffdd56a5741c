"""rope in ONNX: the RotaryEmbedding operator of opset 23."""

from typing import Any

from onnxscript.onnx_opset import opset24 as op


def rope_onnx(x: Any, cos: Any, sin: Any, heads: int, interleaved: bool) -> Any:
    rotary = 2 * int(cos.shape[2])
    some = {} if rotary * heads == int(x.shape[2]) else {"rotary_embedding_dim": rotary}
    return op.RotaryEmbedding(x, cos, sin, interleaved=int(interleaved), num_heads=heads, **some)
