"""The operators of onnxruntime that an exact engine may hold, each with its reason.

docs/cpu-kernels.md defines exact results. An operator that is not in the table is refused.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mtpbuild.runtime.cpu_library import DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

# Operators that compute with several numbers, or a function. The build tries those that a graph
# has (`find_unsteady_operators`), and tests/plugins/test_stock_rows.py tries all of them. A sum of
# floats is not among them: onnxruntime's begins at an address that 16 divides.
COMPUTING = {
    "CumSum": "adds the numbers of a row one after the other",
    "Exp": "computes each number alone, in vectors and after them by the same polynomial",
    "ReduceLogSumExp": "adds a row's exponentials one after the other",
    "ReduceMax": "the largest number is the same in any order",
    "RotaryEmbedding": "the place in its head decides how a number is computed",
    "Sigmoid": "computes each number alone, in vectors and after them by the same polynomial",
    "Softmax": "cuts vectors from the beginning of a row, at any address",
}
BY_REASON = {
    "moves, chooses or makes numbers": """
        Concat ConstantOfShape Expand Gather GatherElements GatherND Identity If OneHot Pad Range
        Reshape ScatterElements ScatterND Shape Slice Split Squeeze TensorScatter Tile Transpose
        Trilu Unsqueeze Where""",
    "compares numbers; ties go to the lowest index": """
        ArgMax Equal Greater GreaterOrEqual Less LessOrEqual Max Min ReduceMin TopK""",
    "rounds once for each number of the result": """
        Abs Add Cast Clip Div Floor Mod Mul Neg Sub""",
    "is of bits": "And BitwiseAnd BitwiseNot BitwiseOr Not Or Xor",
}
ALLOWED = COMPUTING | {op: why for why, ops in BY_REASON.items() for op in ops.split()}
OF_INTEGERS = {"ReduceSum": "a sum of integers is the same in any order"}
ROWS, ALIGNMENT = 7, 64  # of the trials: rows, and bytes within which each address is tried


def find_unknown_operators(files: Iterable[Path]) -> set[str]:
    """Return the operators of the graphs that are neither ours nor in the tables above."""
    return {
        node.op_type
        for node in _list_stock_nodes(files)
        if node.op_type not in ALLOWED
        and not (node.op_type in OF_INTEGERS and node.inputs[0].dtype.is_integer())
    }


def find_unsteady_operators(files: Iterable[Path]) -> set[str]:
    """Return the operators of the graphs whose result for a row depends on more than the row.

    Each is run on rows of the graph's sizes: beside others, and alone at each place in memory.
    """
    import onnx_ir as ir

    nodes = dict[tuple[object, ...], ir.Node]()
    for node in _list_stock_nodes(files):
        x, *others = node.inputs
        if node.op_type not in COMPUTING or x is None or x.dtype != ir.DataType.FLOAT:
            continue
        if x.shape and all(value is not None and value.const_value for value in others):
            nodes[node.op_type, len(x.shape), x.shape[-1]] = node
    return {node.op_type for node in nodes.values() if not _is_steady(node)}


def _is_steady(node: "ir.Node") -> bool:
    import onnx_ir as ir
    import onnxruntime as ort

    x, *others = node.inputs
    assert x is not None
    assert x.shape is not None
    size = x.shape[-1] if isinstance(x.shape[-1], int) else 61
    given = ir.val("x", dtype=x.dtype, shape=ir.Shape([None] * len(x.shape)))
    constants = [ir.val(f"c{i}", const_value=value.const_value) for i, value in enumerate(others)]
    one = ir.node(node.op_type, [given, *constants], {a.name: a for a in node.attributes.values()})
    one.outputs[0].name, one.outputs[0].type = "y", ir.TensorType(x.dtype)
    graph = ir.Graph(
        [given], one.outputs, nodes=[one], initializers=constants, opset_imports={"": 21}
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    session = ort.InferenceSession(model.SerializeToString(), options)
    shape = ROWS, *[1] * (len(x.shape) - 2), size
    rows = 3 * np.random.default_rng(size).standard_normal(shape).astype(np.float32)
    together = session.run(None, {"x": rows})[0]
    return all(
        np.array_equal(session.run(None, {"x": copy})[0], together[i : i + 1])
        for i in range(ROWS)
        for copy in place_everywhere(rows[i : i + 1])
    )


def place_everywhere(rows: "NDArray[np.float32]") -> "Iterator[NDArray[np.float32]]":
    """Yield copies of rows at every alignment of a float within `ALIGNMENT` bytes."""
    memory = np.empty(rows.size + 2 * ALIGNMENT // 4, np.float32)
    first = -memory.ctypes.data % ALIGNMENT // 4
    for start in range(first, first + ALIGNMENT // 4):
        copy = memory[start : start + rows.size].reshape(rows.shape)
        copy[:] = rows
        yield copy


def _list_stock_nodes(files: Iterable[Path]) -> "Iterator[ir.Node]":
    import onnx_ir as ir

    for file in files:
        yield from (node for node in ir.load(file).graph.all_nodes() if node.domain != DOMAIN)
