"""onnxruntime's operators that graphs with our kernels hold: a row's result is its own."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import helper

from mtpbuild.builder.targets.onnxruntime import exact
from mtpbuild.builder.targets.onnxruntime.exact import (
    ALLOWED,
    COMPUTING,
    find_unknown_operators,
    find_unsteady_operators,
    place_everywhere,
)

LAST = [np.array([-1])]
OPERATORS: dict[str, list[NDArray[Any]]] = {
    **{name: [] for name in ("Sigmoid", "Exp", "Softmax")},
    **dict.fromkeys(("ReduceMax", "ReduceLogSumExp"), LAST),
    "CumSum": [np.array(-1)],
}
MORE = OPERATORS | {"ReduceSum": LAST}


def make_model(op: str, size: int | None = None, dtype: int = onnx.TensorProto.FLOAT) -> Any:
    more = [onnx.numpy_helper.from_array(array, "more") for array in MORE.get(op, [])]
    node = helper.make_node(op, ["x", *(array.name for array in more)], ["y"])
    x = helper.make_tensor_value_info("x", dtype, [None, size])
    y = helper.make_tensor_value_info("y", dtype, None)
    graph = helper.make_graph([node], "one", [x], [y], more)
    opsets = [helper.make_opsetid("", 21)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def make_session(op: str, threads: int = 1) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(make_model(op).SerializeToString(), options)


def count_unsteady_rows(op: str, size: int) -> int:
    """Count the rows whose bits, alone at some place in memory, are not those beside others."""
    x = 3 * np.random.default_rng(size).standard_normal((7, size)).astype(np.float32)
    session = make_session(op, 2)
    together = session.run(None, {"x": x})[0]
    return sum(
        not np.array_equal(session.run(None, {"x": copy})[0], together[row : row + count])
        for count in (1, 2, 3)
        for row in range(0, 7 - count, 2)
        for copy in place_everywhere(x[row : row + count])
    )


@pytest.mark.parametrize("size", [1, 3, 5, 6, 7, 8, 10, 13, 24, 61, 192, 257, 513, 2048])
@pytest.mark.parametrize("op", [*OPERATORS])
def test_rows_alone(op: str, size: int) -> None:
    assert count_unsteady_rows(op, size) == 0


@pytest.mark.parametrize("size", [5, 10, 61, 513])
def test_sums_of_onnxruntime_look_at_an_address(size: int) -> None:
    """So no exact engine holds one of floats."""
    assert count_unsteady_rows("ReduceSum", size) > 0
    assert "ReduceSum" not in ALLOWED


def test_the_table_names_what_is_tried() -> None:
    assert {*OPERATORS, "RotaryEmbedding"} == {*COMPUTING}


@pytest.mark.parametrize("op", [*OPERATORS, "ReduceSum", "Cos"])
def test_a_build_tries_the_operators_of_its_graphs(op: str, tmp_path: Path) -> None:
    """An operator that is in the table without reason is found by its graph's own size."""
    onnx.save(make_model(op, 3 if op == "Cos" else 13), tmp_path / "graph.onnx")
    files = [tmp_path / "graph.onnx"]
    steady = op in OPERATORS
    assert (find_unknown_operators(files) == set()) == steady
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(exact.COMPUTING, op, "a guess")
        assert find_unsteady_operators(files) == (set() if steady else {op})


def test_sums_of_integers_are_allowed(tmp_path: Path) -> None:
    onnx.save(make_model("ReduceSum", 13, onnx.TensorProto.INT64), tmp_path / "graph.onnx")
    assert find_unknown_operators([tmp_path / "graph.onnx"]) == set()


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
