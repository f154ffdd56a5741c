"""delta_rule and delta_advance in ONNX: ONNX Runtime's own LinearAttention."""

from itertools import pairwise
from typing import Any

from onnxscript.onnx_opset import opset24 as op

from mtpbuild.plugins.delta_rule.op import EPSILON
from mtpbuild.plugins.onnx import ONNXRUNTIME, declare_operator
from mtpbuild.plugins.onnx_attention import count_up, ints

OPERANDS = "query key value past_state decay beta"
SETTINGS: dict[str, Any] = {"q_num_heads": 0, "kv_num_heads": 0, "scale": 0.0, "update_rule": ""}
LinearAttention = declare_operator(ONNXRUNTIME, "LinearAttention", OPERANDS, 2, **SETTINGS)


def delta_rule_onnx(mixed: Any, ba: Any, rate: Any, bias: Any, state: Any) -> Any:
    outputs, after = attend(mixed, ba, rate, bias, state, None)
    heads, _, width = sizes(state)
    return op.Reshape(outputs, ints(0, 0, heads, width)), after


def delta_advance_onnx(mixed: Any, ba: Any, rate: Any, bias: Any, state: Any, n: Any) -> Any:
    return attend(mixed, ba, rate, bias, state, n)[1]


def attend(mixed: Any, ba: Any, rate: Any, bias: Any, state: Any, n: Any) -> tuple[Any, Any]:
    """Emit LinearAttention, with a token's heads adjacent; tokens from n [B] on change no state."""
    heads, width, values = sizes(state)
    keys = (int(mixed.shape[2]) - heads * values) // 2
    borders = (0, keys, 2 * keys, 2 * keys + heads * values)
    q, k, v = (
        op.Slice(mixed, ints(first), ints(end), ints(-1)) for first, end in pairwise(borders)
    )
    q, k = (spread(rows, keys // width, width, heads) for rows in (q, k))
    b, a = op.Split(ba, axis=-1, num_outputs=2)
    decay = op.Neg(op.Mul(rate, op.Softplus(op.Add(a, bias))))
    beta = op.Sigmoid(b)
    if n is not None:
        place = op.Unsqueeze(count_up(op.Shape(ba, start=1, end=2)), ints(0))
        stays = op.Less(place, op.Unsqueeze(n, ints(1)))
        stays = op.Unsqueeze(stays, ints(2))
        none = op.Constant(value_float=0.0)
        decay, beta = op.Where(stays, decay, none), op.Where(stays, beta, none)
    how = {"q_num_heads": heads, "kv_num_heads": heads, "scale": width**-0.5}
    results: tuple[Any, Any] = LinearAttention(
        q, k, v, state, decay, beta, update_rule="gated_delta", **how
    )
    return results


def spread(x: Any, groups: int, width: int, heads: int) -> Any:
    """Normalise each head to length 1 and repeat it for the value heads it serves: [B, T, H K]."""
    split = op.Reshape(x, ints(0, 0, groups, 1, width))
    squares = op.ReduceSum(op.Mul(split, split), ints(-1), keepdims=1)
    length = op.Sqrt(op.Add(squares, op.Constant(value_float=EPSILON)))
    every = op.Expand(op.Div(split, length), ints(1, 1, 1, heads // groups, 1))
    return op.Reshape(every, ints(0, 0, heads * width))


def sizes(state: Any) -> list[int]:
    return [int(size) for size in state.shape[1:]]
