"""accept_rewind in ONNX: one TopK for targets and margins; the rest is [B, T] integers."""

from typing import Any

from onnxscript.onnx_opset import opset24 as op

from mtpbuild.plugins.onnx_attention import ints


def accept_rewind_onnx(
    logits: Any, window: Any, num_drafts: Any, lengths: Any, active: Any
) -> tuple[Any, ...]:
    T, zero, last = int(window.shape[1]), ints(0), ints(2)
    row = ints(*range(T))
    none = op.Constant(value_int=-1)
    values, ids = op.TopK(logits, ints(2), axis=-1)  # ties: the lower index comes first
    top, second = op.Split(values, axis=-1, num_outputs=2)
    target = op.Squeeze(op.Slice(ids, zero, ints(1), last), last)
    drafts = op.Slice(op.Pad(window, ints(0, 0, 0, 1), none), ints(1), ints(T + 1), ints(1))
    real = op.Less(row, op.Unsqueeze(num_drafts, ints(1)))
    # T - 1 if the row's draft is kept, else the row's index: the minimum is the number kept.
    kept = op.Where(op.And(op.Equal(drafts, target), real), ints(T - 1), row)
    emitted = op.Add(op.ReduceMin(kept, ints(1), keepdims=0), ints(1))
    n = op.Where(active, emitted, zero)
    tokens = op.Where(op.Less(row, op.Unsqueeze(n, ints(1))), target, none)
    logprobs = op.Squeeze(op.Sub(top, op.ReduceLogSumExp(logits, last, keepdims=1)), last)
    margins = op.Squeeze(op.Sub(top, second), last)
    return tokens, n, op.Add(lengths, n), logprobs, margins
