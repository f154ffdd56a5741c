"""accept_rewind in ONNX: one TopK for targets and margins; the rest is [B, T] integers."""

from typing import Any

import numpy as np
from onnxscript import ir
from onnxscript.onnx_opset import opset24 as op


def accept_rewind_onnx(
    logits: Any, window: Any, num_drafts: Any, lengths: Any, active: Any
) -> tuple[Any, ...]:
    T = int(window.shape[1])
    K, row = T - 1, _const(np.arange(T))
    values, ids = op.TopK(logits, _const([2]), axis=-1)  # ties: the lower index comes first
    top, second = op.Split(values, axis=-1, num_outputs=2)
    target = op.Squeeze(op.Slice(ids, _const([0]), _const([1]), _const([2])), _const([2]))
    if K:
        drafts = op.Slice(window, _const([1]), _const([T]), _const([1]))
        real = op.Less(_const(np.arange(K)), op.Unsqueeze(num_drafts, _const([1])))
        targets = op.Slice(target, _const([0]), _const([K]), _const([1]))
        equal = op.And(op.Equal(drafts, targets), real)
        mismatch = op.Where(equal, _const(K), _const(np.arange(K)))
        accepted = op.ReduceMin(mismatch, _const([1]), keepdims=0)
        n = op.Where(active, op.Add(accepted, _const(1)), _const(0))
    else:
        n = op.Cast(active, to=ir.DataType.INT64)
    tokens = op.Where(op.Less(row, op.Unsqueeze(n, _const([1]))), target, _const(-1))
    total = op.ReduceLogSumExp(logits, _const([2]), keepdims=1)
    logprobs = op.Squeeze(op.Sub(top, total), _const([2]))
    margins = op.Squeeze(op.Sub(top, second), _const([2]))
    return tokens, n, op.Add(lengths, n), logprobs, margins


def _const(value: Any) -> Any:
    return op.Constant(value=ir.tensor(np.asarray(value, np.int64)))
