"""What ops with caches share in ONNX: one softmax over blocks of rows, and masks of rows."""

import math
from collections.abc import Sequence
from typing import Any

from onnxscript.onnx_opset import opset24 as op

from mtpbuild.plugins.mla_attention.op import FLOOR, holds_rows


def attend(rows: Any, masks: Sequence[Any], blocks: Sequence[Any], split: Any) -> Any:
    """Mix values by one softmax over blocks of rows; each block has an additive mask.

    rows: scaled queries. split: returns a block's keys and values. Blocks without mask are skipped.
    """
    halves = [split(block) for _, block in zip(masks, blocks, strict=False)]
    scores = [
        op.Add(op.MatMul(rows, op.Transpose(keys, perm=[0, 1, 3, 2])), mask)
        for mask, (keys, _) in zip(masks, halves, strict=True)
    ]
    joined = scores[0] if len(scores) == 1 else op.Concat(*scores, axis=-1)
    largest = op.ReduceMax(joined, ints(-1), keepdims=1)
    least = op.Add(largest, op.Constant(value_float=math.log(FLOOR)))
    p = op.Softmax(op.Max(joined, least), axis=-1)  # as `floored_softmax`
    if len(halves) == 1:
        return op.MatMul(p, halves[0][1])
    border = count_rows(blocks[0])
    end = op.Shape(p, start=3)
    axis = ints(3)
    (_, old), (_, new) = halves
    mixed = op.MatMul(op.Slice(p, ints(0), border, axis), old)
    return op.Add(mixed, op.MatMul(op.Slice(p, border, end, axis), new))


def count_rows(rows: Any) -> Any:
    return op.Shape(rows, start=2, end=3)


def mask_rows(cache: Any, fresh: Any, base: Any, first: Any, heads: int, tokens: Any) -> list[Any]:
    """Return masks over the cache's rows and over the fresh rows.

    If the fresh rows have just been written into the cache, the first mask is enough.
    """
    if holds_rows(cache, fresh):
        return [mask_later_rows(count_rows(cache), op.Add(base, first), heads, tokens)]
    before = op.Sub(base, op.Constant(value_int=1))
    old = mask_later_rows(count_rows(cache), before, heads, None)
    return [old, mask_later_rows(count_rows(fresh), first, heads, tokens)]


def mask_later_rows(rows: Any, last: Any, heads: int, tokens: Any) -> Any:
    """Return an additive mask [B, 1, H * T, rows]: query t sees row j if j <= last[b] + t.

    Without `tokens` all queries see the same rows, and the mask is [B, 1, 1, rows]. Masks are equal
    in all layers, so that merging common subexpressions leaves one.
    """
    visible = op.Reshape(last, ints(-1, 1, 1, 1))
    if tokens is not None:
        visible = op.Add(visible, op.Unsqueeze(count_up(tokens), ints(1)))  # [B, 1, T, 1]
    seen = op.LessOrEqual(count_up(rows), visible)
    mask = op.Where(seen, op.Constant(value_float=0.0), op.Constant(value_float=-math.inf))
    return mask if tokens is None or heads == 1 else op.Concat(*[mask] * heads, axis=2)


def mask_others(cache: Any, fresh: Any, base: Any, heads: int, chosen: Any) -> list[Any]:
    """Return masks [B, 1, H * T, ..] like those of `mask_rows`; chosen rows are visible.

    Positions from base on are fresh rows, unless these have been written into the cache.
    """
    written = holds_rows(cache, fresh)
    rows = count_rows(cache)
    start = rows if written else op.Unsqueeze(base, ints(1, 2))
    end = op.Add(rows, ints(0) if written else count_rows(fresh))
    place = op.Where(op.Less(chosen, start), chosen, op.Add(op.Sub(chosen, start), rows))
    place = op.Where(op.Less(chosen, op.Constant(value_int=0)), end, op.Min(place, end))
    sizes = op.Concat(op.Shape(chosen, end=2), op.Add(end, ints(1)), axis=0)
    none = op.Expand(op.Constant(value_float=-math.inf), sizes)
    zeros = op.Expand(op.Constant(value_float=0.0), op.Shape(chosen))
    seen = op.Unsqueeze(op.ScatterElements(none, place, zeros, axis=2), ints(1))
    borders = [(ints(0), rows)] if written else [(ints(0), rows), (rows, end)]
    parts = [op.Slice(seen, first, last, ints(3)) for first, last in borders]
    return [op.Concat(*[part] * heads, axis=2) if heads > 1 else part for part in parts]


def count_up(count: Any) -> Any:
    return op.Range(op.Constant(value_int=0), op.Squeeze(count), op.Constant(value_int=1))


def ints(*values: int) -> Any:
    return op.Constant(value_ints=list(values))
