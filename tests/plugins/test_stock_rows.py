"""onnxruntime's operators that graphs with our kernels hold: a row's result is its own."""

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import helper

from mtpbuild.builder.targets.exact import PROBED

LAST = [np.array([-1])]
OPERATORS: dict[str, list[NDArray[Any]]] = {
    **{name: [] for name in ("Sigmoid", "Exp", "Softmax")},
    **dict.fromkeys(("ReduceSum", "ReduceMax", "ReduceLogSumExp"), LAST),
    "CumSum": [np.array(-1)],
}


def run(op: str, x: NDArray[np.float32], threads: int = 1) -> NDArray[np.float32]:
    more = [onnx.numpy_helper.from_array(array, "more") for array in OPERATORS.get(op, [])]
    node = helper.make_node(op, ["x", *(each.name for each in more)], ["y"])
    given = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None] * x.ndim)
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "one", [given], [y], more)
    opsets = [helper.make_opsetid("", 21)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options)
    return np.asarray(session.run(None, {"x": x})[0])


@pytest.mark.parametrize("size", [3, 8, 24, 61, 192, 2048])
@pytest.mark.parametrize("op", [*OPERATORS])
def test_rows_alone(op: str, size: int) -> None:
    x = 3 * np.random.default_rng(size).standard_normal((7, size)).astype(np.float32)
    together = run(op, x, threads=2)
    for count in (1, 2, 3):
        for row in range(0, 7 - count, 2):
            some = run(op, x[row : row + count])
            np.testing.assert_array_equal(some, together[row : row + count])


def test_the_table_names_what_is_probed() -> None:
    assert {*OPERATORS, "RotaryEmbedding"} == PROBED


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize(("heads", "half", "rest"), [(1, 8, 0), (3, 5, 7), (8, 32, 0)])
def test_rotation_of_a_token_alone(heads: int, half: int, rest: int, interleaved: int) -> None:
    rng = np.random.default_rng(half)
    given = {
        "x": rng.standard_normal((2, 7, heads * (2 * half + rest))).astype(np.float32),
        "cos": rng.standard_normal((2, 7, half)).astype(np.float32),
        "sin": rng.standard_normal((2, 7, half)).astype(np.float32),
    }
    how = {"num_heads": heads, "interleaved": interleaved}
    some = {"rotary_embedding_dim": 2 * half} if rest else {}
    node = helper.make_node("RotaryEmbedding", [*given], ["y"], **how, **some)
    values = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None] * 3)
        for name in (*given, "y")
    ]
    graph = helper.make_graph([node], "one", values[:-1], values[-1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    session = ort.InferenceSession(model.SerializeToString(), options)
    together = np.asarray(session.run(None, given)[0])
    for slot in range(2):
        for t in range(7):
            own = {name: x[slot : slot + 1, t : t + 1].copy() for name, x in given.items()}
            np.testing.assert_array_equal(session.run(None, own)[0], together[slot, t][None, None])


def test_what_is_not_so_is_seen() -> None:
    """Cosines of onnxruntime are computed four at a time, and what is left otherwise."""
    x = np.random.default_rng(3).standard_normal((40, 3)).astype(np.float32) * 3
    together = run("Cos", x)
    assert any(not np.array_equal(run("Cos", x[i : i + 1])[0], together[i]) for i in range(40))
