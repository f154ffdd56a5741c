"""causal_conv in ONNX, by ONNX Runtime's own CausalConvWithState, and last_inputs."""

from typing import Any

from onnxscript.onnx_opset import opset24 as op

from mtpbuild.plugins.onnx import ONNXRUNTIME, declare_operator
from mtpbuild.plugins.take_rows.onnx import gather_rows

OPERANDS = "input weight bias past_state"
CausalConv = declare_operator(
    ONNXRUNTIME, "CausalConvWithState", OPERANDS, 2, activation="", ndim=1
)


def causal_conv_onnx(x: Any, tail: Any, weight: Any) -> Any:
    """Emit one node over channels [B, C, T]; the state that it returns is not used."""
    channels, past = (op.Transpose(rows, perm=[0, 2, 1]) for rows in (x, tail))
    taps = op.Unsqueeze(op.Transpose(weight, perm=[1, 0]), op.Constant(value_ints=[1]))
    y, _ = CausalConv(channels, taps, None, past, activation="silu", ndim=1)
    return op.Transpose(y, perm=[0, 2, 1])


def last_inputs_onnx(tail: Any, inputs: Any, n: Any) -> Any:
    count, channels = int(tail.shape[1]), int(tail.shape[2])
    return gather_rows(op.Concat(tail, inputs, axis=1), n, count, [channels])
