"""mla_attention in ONNX: matrix products for all heads at once, and one softmax."""

from typing import Any

from onnxscript.onnx_opset import opset24 as op

from mtpbuild.plugins.definition import bind
from mtpbuild.plugins.mla_attention.op import mla_attention
from mtpbuild.plugins.onnx_attention import attend, ints, mask_others, mask_rows


def mla_attention_onnx(*operands: Any) -> Any:
    """Emit the op with heads as rows [B, 1, H * T, C], to read the cache once for all heads.

    `chosen` becomes a mask: all rows are read.
    """
    known = bind(mla_attention, operands)
    q, cache, fresh, base, first, scale, kv_lora_rank, chosen = known.values()
    heads, width = int(q.shape[1]), int(q.shape[3])
    rows = op.Mul(op.Reshape(q, ints(0, 1, -1, width)), op.Constant(value_float=scale))
    if extra := int(cache.shape[3]) - width:  # values of a row that are not part of its key
        rows = op.Pad(rows, ints(0, 0, 0, 0, 0, 0, 0, extra))
    if chosen is None:
        masks = mask_rows(cache, fresh, base, first, heads, op.Shape(q, start=2, end=3))
    else:
        masks = mask_others(cache, fresh, base, heads, chosen)
    mixed = attend(rows, masks, (cache, fresh), lambda block: (block, block))
    latents = op.Slice(mixed, ints(0), ints(kv_lora_rank), ints(3))
    return op.Reshape(latents, ints(0, heads, -1, kv_lora_rank))
