"""index_keys and choose_rows in ONNX: TopK, whose ties go to the lowest index."""

import math
from typing import Any

from onnxscript.onnx_opset import opset24 as op

from mtpbuild.plugins.definition import bind
from mtpbuild.plugins.onnx_attention import count_rows, count_up, ints
from mtpbuild.plugins.rope.onnx import rope_onnx
from mtpbuild.plugins.sparse_rows.op import NONE, choose_rows

AFTER_ALL = (1 << 63) - 1  # a position after all others


def index_keys_onnx(
    a: Any, weight: Any, bias: Any, cos: Any, sin: Any, eps: float, interleaved: bool
) -> Any:
    normed, *_ = op.LayerNormalization(a, weight, bias, axis=-1, epsilon=eps)
    normed.shape = a.shape  # `rope_onnx` needs it
    return rope_onnx(normed, cos, sin, 1, interleaved)


def choose_rows_onnx(*operands: Any) -> Any:
    """Emit the op: score the cache's and the fresh rows together [B, T, S + F], then take TopK."""
    known = bind(choose_rows, operands)
    q, weights, cos, sin, cache, fresh, base, first, count, interleaved = known.values()
    heads = int(weights.shape[2])
    size = int(q.shape[2]) // heads
    turned = rope_onnx(q, cos, sin, heads, interleaved)
    queries = op.Reshape(turned, ints(0, 0, heads, size))
    keys = op.Concat(*(slice_keys(rows, size) for rows in (cache, fresh)), axis=-1)  # [B, 1, D, N]
    raw = op.Mul(op.MatMul(queries, keys), number(size**-0.5))  # [B, T, H, N]
    shares = op.Unsqueeze(op.Mul(weights, number(heads**-0.5)), ints(2))
    scores = op.Squeeze(op.MatMul(shares, op.Relu(raw)), ints(2))  # [B, T, N]
    rows, every = count_rows(cache), op.Shape(scores, start=2)
    seen = visible(rows, every, op.Shape(weights, start=1, end=2), base, first)
    masked = op.Where(seen, scores, number(-math.inf))
    limit = op.Min(every, ints(count))
    values, order = op.TopK(masked, limit, axis=-1)
    start = op.Unsqueeze(base, ints(1, 2))
    fresh_place = op.Add(op.Sub(order, rows), start)
    position = op.Where(op.Less(order, rows), order, fresh_place)
    there = op.Greater(values, number(-math.inf))
    after_all = op.Constant(value_int=AFTER_ALL)
    positions, _ = op.TopK(op.Where(there, position, after_all), limit, axis=-1, largest=0)
    none = op.Constant(value_int=NONE)
    positions = op.Where(op.Equal(positions, after_all), none, positions)
    padding = op.Concat(ints(0, 0, 0, 0, 0), op.Sub(ints(count), limit), axis=0)
    return op.Pad(positions, padding, none)


def slice_keys(rows: Any, size: int) -> Any:
    """Return the keys [B, 1, D, ..] of rows [B, 1, .., C]: their last D values."""
    width = int(rows.shape[3])
    keys = op.Slice(rows, ints(width - size), ints(width), ints(3))
    return op.Transpose(keys, perm=[0, 1, 3, 2])


def visible(rows: Any, every: Any, tokens: Any, base: Any, first: Any) -> Any:
    """Return which rows of the cache, then which fresh rows, each token may choose: [B, T, N]."""
    place = count_up(every)
    old = op.Less(place, op.Unsqueeze(base, ints(1, 2)))  # [B, 1, N]
    last = op.Add(op.Unsqueeze(first, ints(1, 2)), op.Unsqueeze(count_up(tokens), ints(1)))
    new = op.LessOrEqual(place, op.Add(last, rows))  # [B, T, N]
    return op.Or(old, op.And(new, op.GreaterOrEqual(place, rows)))


def number(value: float) -> Any:
    return op.Constant(value_float=value)
