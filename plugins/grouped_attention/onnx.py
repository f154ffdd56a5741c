"""grouped_attention in ONNX: one product per group, whose heads and tokens are rows."""

from typing import Any

from onnxscript.onnx_opset import opset24 as op

from mtpbuild.plugins.mla_attention.onnx import count, ints, mask, scores, softmax
from mtpbuild.plugins.mla_attention.op import contains


def grouped_attention_onnx(
    q: Any, cache: Any, fresh: Any, base: Any, first: Any, scale: float, groups: int
) -> Any:
    """Emit the op with a group's heads as rows [B, G, H / G * T, D]: its keys are read once.

    If the fresh rows have just been written into this cache, one block of scores over the cache is
    enough; otherwise two blocks share one softmax.
    """
    heads, width = int(q.shape[1]), int(q.shape[3])
    per_group, tokens = heads // groups, op.Shape(q, start=2, end=3)
    rows = op.Reshape(q, ints(0, groups, -1, width))
    rows = op.Mul(rows, op.Constant(value_float=scale))
    keys, values = _heads(cache, groups, width)
    border = count(cache)
    if contains(cache, fresh):
        seen = mask(border, op.Add(base, first), per_group, tokens)
        mixed = op.MatMul(softmax(op.Add(scores(rows, keys), seen)), values)
    else:
        new_keys, new_values = _heads(fresh, groups, width)
        before = op.Sub(base, op.Constant(value_int=1))
        old = op.Add(scores(rows, keys), mask(border, before, per_group, None))
        seen = mask(count(fresh), first, per_group, tokens)
        p = softmax(old, op.Add(scores(rows, new_keys), seen))
        end, last = op.Shape(p, start=3), ints(3)
        mixed = op.Add(
            op.MatMul(op.Slice(p, ints(0), border, last), values),
            op.MatMul(op.Slice(p, border, end, last), new_values),
        )
    return op.Reshape(mixed, ints(0, heads, -1, width))


def _heads(rows: Any, groups: int, width: int) -> tuple[Any, Any]:
    """Split rows [B, 1, S, 2 G D] into keys and values, each [B, G, S, D]."""
    each = op.Reshape(rows, ints(0, -1, 2 * groups, width))
    keys, values = op.Split(op.Transpose(each, perm=[0, 2, 1, 3]), axis=1, num_outputs=2)
    return keys, values
