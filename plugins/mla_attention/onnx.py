"""mla_attention in ONNX: matrix products for all heads at once, and one softmax."""

import math
from typing import Any

from onnxscript.onnx_opset import opset24 as op

from mtpbuild.plugins.definition import bind
from mtpbuild.plugins.mla_attention.op import FLOOR, contains, mla_attention


def mla_attention_onnx(*operands: Any) -> Any:
    """Emit the op with heads as rows [B, 1, H * T, C]: the cache is read once for all heads.

    If the fresh rows have just been written into this cache, one block of scores over the cache is
    enough; otherwise two blocks share one softmax. `chosen` becomes a mask: all rows are read.
    """
    known = bind(mla_attention, operands)
    q, cache, fresh, base, first, scale, kv_lora_rank, chosen = known.values()
    heads, width = int(q.shape[1]), int(q.shape[3])
    tokens = op.Shape(q, start=2, end=3)
    rows = op.Reshape(q, ints(0, 1, -1, width))
    rows = op.Mul(rows, op.Constant(value_float=scale))
    if beside := int(cache.shape[3]) - width:  # values of a row that are not part of its key
        rows = op.Pad(rows, ints(0, 0, 0, 0, 0, 0, 0, beside))
    if contains(cache, fresh):
        if chosen is None:
            seen = mask(count(cache), op.Add(base, first), heads, tokens)
        else:
            seen, _ = chosen_masks(chosen, count(cache), count(cache), ints(0), heads)
        mixed = op.MatMul(softmax(op.Add(scores(rows, cache), seen)), cache)
    else:
        if chosen is None:
            before = op.Sub(base, op.Constant(value_int=1))
            masks = (
                mask(count(cache), before, heads, None),
                mask(count(fresh), first, heads, tokens),
            )
        else:
            start = op.Unsqueeze(base, ints(1, 2))
            masks = chosen_masks(chosen, start, count(cache), count(fresh), heads)
        old, new = op.Add(scores(rows, cache), masks[0]), op.Add(scores(rows, fresh), masks[1])
        p = softmax(old, new)
        border, end = count(cache), op.Shape(p, start=3)
        mixed = op.Add(
            op.MatMul(op.Slice(p, ints(0), border, ints(3)), cache),
            op.MatMul(op.Slice(p, border, end, ints(3)), fresh),
        )
    latents = op.Slice(mixed, ints(0), ints(kv_lora_rank), ints(3))
    return op.Reshape(latents, ints(0, heads, -1, kv_lora_rank))


def softmax(*masked: Any) -> Any:
    """Apply `floored_softmax` to blocks of scores, concatenated along the last axis."""
    joined = masked[0] if len(masked) == 1 else op.Concat(*masked, axis=-1)
    largest = op.ReduceMax(joined, ints(-1), keepdims=1)
    least = op.Add(largest, op.Constant(value_float=math.log(FLOOR)))
    return op.Softmax(op.Max(joined, least), axis=-1)


def scores(rows: Any, keys: Any) -> Any:
    return op.MatMul(rows, op.Transpose(keys, perm=[0, 1, 3, 2]))


def count(rows: Any) -> Any:
    return op.Shape(rows, start=2, end=3)


def mask(rows: Any, last: Any, heads: int, tokens: Any) -> Any:
    """Return an additive mask [B, 1, H * T, rows]: query t sees row j if j <= last[b] + t.

    Without `tokens` all queries see the same rows, and the mask is [B, 1, 1, rows]. It is the same
    in every layer, so merging common subexpressions leaves one.
    """
    visible = op.Reshape(last, ints(-1, 1, 1, 1))
    if tokens is not None:
        visible = op.Add(visible, op.Unsqueeze(counted(tokens), ints(1)))  # [B, 1, T, 1]
    seen = op.LessOrEqual(counted(rows), visible)
    one = op.Where(seen, op.Constant(value_float=0.0), op.Constant(value_float=-math.inf))
    return one if tokens is None or heads == 1 else op.Concat(*[one] * heads, axis=2)


def chosen_masks(
    chosen: Any, start: Any, rows: Any, fresh_rows: Any, heads: int
) -> tuple[Any, Any]:
    """Return additive masks [B, 1, H * T, ..] over the cache's rows, and over the fresh ones.

    Positions from `start` on are fresh rows. All chosen rows are visible.
    """
    end = op.Add(rows, fresh_rows)
    place = op.Where(op.Less(chosen, start), chosen, op.Add(op.Sub(chosen, start), rows))
    place = op.Where(op.Less(chosen, op.Constant(value_int=0)), end, op.Min(place, end))
    sizes = op.Concat(op.Shape(chosen, end=2), op.Add(end, ints(1)), axis=0)
    none = op.Expand(op.Constant(value_float=-math.inf), sizes)
    zeros = op.Expand(op.Constant(value_float=0.0), op.Shape(chosen))
    seen = op.Unsqueeze(op.ScatterElements(none, place, zeros, axis=2), ints(1))
    parts = (op.Slice(seen, ints(0), rows, ints(3)), op.Slice(seen, rows, end, ints(3)))
    old, new = (op.Concat(*[part] * heads, axis=2) if heads > 1 else part for part in parts)
    return old, new


def counted(count: Any) -> Any:
    return op.Range(op.Constant(value_int=0), op.Squeeze(count), op.Constant(value_int=1))


def ints(*values: int) -> Any:
    return op.Constant(value_ints=list(values))
