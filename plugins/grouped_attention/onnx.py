"""grouped_attention in ONNX: one product per group, whose heads and tokens are rows."""

from typing import Any

from onnxscript.onnx_opset import opset24 as op

from mtpbuild.plugins.onnx_attention import attend, ints, mask_rows


def grouped_attention_onnx(
    q: Any, cache: Any, fresh: Any, base: Any, first: Any, scale: float, groups: int
) -> Any:
    """Emit the op with a group's heads as rows [B, G, H / G * T, D], to read its keys once."""
    heads, width = int(q.shape[1]), int(q.shape[3])
    rows = op.Mul(op.Reshape(q, ints(0, groups, -1, width)), op.Constant(value_float=scale))

    def split(rows: Any) -> Any:
        """Split rows [B, 1, S, 2 G D] into keys and values, each [B, G, S, D]."""
        by_head = op.Reshape(rows, ints(0, -1, 2 * groups, width))
        return op.Split(op.Transpose(by_head, perm=[0, 2, 1, 3]), axis=1, num_outputs=2)

    tokens = op.Shape(q, start=2, end=3)
    masks = mask_rows(cache, fresh, base, first, heads // groups, tokens)
    mixed = attend(rows, masks, (cache, fresh), split)
    return op.Reshape(mixed, ints(0, heads, -1, width))
