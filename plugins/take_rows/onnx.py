"""take_rows in ONNX: GatherElements by row indices."""

from collections.abc import Sequence
from typing import Any

from onnxscript.onnx_opset import opset24 as op

from mtpbuild.plugins.onnx_attention import ints


def take_rows_onnx(x: Any, start: Any, count: int) -> Any:
    return gather_rows(x, start, count, [int(size) for size in x.shape[2:]])


def gather_rows(x: Any, start: Any, count: int, widths: Sequence[int]) -> Any:
    """Emit the op for x whose last dimensions are `widths`."""
    index = op.Unsqueeze(start, ints(1))
    if count > 1:
        index = op.Add(index, ints(*range(count)))
    if widths:
        index = op.Unsqueeze(index, ints(*range(2, 2 + len(widths))))
        index = op.Expand(index, ints(1, 1, *widths))
    return op.GatherElements(x, index, axis=1)
