"""The operators of ONNX graphs whose results depend on tokens and weights alone.

docs/cpu-kernels.md defines such results. Probe an operator before you add it here.
"""

from collections.abc import Iterable
from pathlib import Path

from mtpbuild.runtime.cpu_library import DOMAIN

# Operators that sum or compute a function. tests/plugins/test_stock_rows.py checks that onnxruntime
# computes a row to the same bits alone and beside others.
PROBED = frozenset(
    (
        "CumSum",
        "Exp",
        "ReduceLogSumExp",
        "ReduceMax",
        "ReduceSum",
        "RotaryEmbedding",
        "Sigmoid",
        "Softmax",
    )
)
# Operators that move, compare or choose numbers, or round once for each number of the result.
NAMES = """
Abs Add And ArgMax BitwiseAnd BitwiseNot BitwiseOr Cast Clip Concat ConstantOfShape Div Equal
Expand Floor Gather GatherElements GatherND Greater GreaterOrEqual Identity If Less LessOrEqual
Max Min Mod Mul Neg Not OneHot Or Pad Range ReduceMin Reshape ScatterElements ScatterND Shape
Slice Split Squeeze Sub TensorScatter Tile TopK Transpose Trilu Unsqueeze Where Xor
"""
BY_ELEMENT = frozenset(NAMES.split())


def find_unknown_operators(files: Iterable[Path]) -> set[str]:
    """Return the operators of the graphs that are neither ours nor in the tables above."""
    import onnx_ir as ir

    names = {
        node.op_type
        for file in files
        for node in ir.load(file).graph.all_nodes()
        if node.domain != DOMAIN
    }
    return names - PROBED - BY_ELEMENT
