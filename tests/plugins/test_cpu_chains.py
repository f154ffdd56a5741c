"""Chains of the CPU's operators: they do what their nodes do, and refuse what can't be."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper

from mtpbuild.builder.targets.onnxruntime.chains import join_chains
from mtpbuild.builder.targets.onnxruntime.lowering import OPSET
from mtpbuild.plugins.cpu.onnx import PYTORCH
from mtpbuild.runtime.cpu_library import DOMAIN
from tests.support.cpu_kernels import open_session
from tests.support.isas import isas

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64
OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
Given = dict[str, NDArray[Any]]


def own(op: str, inputs: list[str], outputs: list[str], **how: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, domain=DOMAIN, **how)


def layer() -> tuple[onnx.ModelProto, Given]:
    """Make a graph of a norm, rows into a cache, a foreign sum between products, and a verdict."""
    rng = np.random.default_rng(0)
    B, T, E, latent, half, S, V = 2, 3, 32, 16, 4, 8, 50
    width = latent + 2 * half
    shapes = {"x": (B, T, E), "norm": (E,), "a": (E, E + width), "kv_norm": (latent,)}
    shapes |= {"cos": (B, T, half), "sin": (B, T, half), "cache": (B, 1, S, width)}
    shapes |= {"b": (E, E), "head": (E, V)}
    given: Given = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    given |= {"start": np.array([0, 4]), "window": rng.integers(0, V, (B, T))}
    given |= {"drafts": np.array([2, 1]), "lengths": np.array([0, 4]), "active": np.ones(B, bool)}
    rows = ["ab", "", "kv_norm", "cos", "sin", "cache", "start"]
    nodes = [
        own("Norm", ["x", "norm"], ["n"], epsilon=1e-6),
        own("Product", ["n", "a"], ["ab"]),
        own("LatentRows", rows, ["q", "fresh", "held"], epsilon=1e-5, interleaved=1),
        helper.make_node("Add", ["q", "x"], ["sum"]),
        own("Product", ["sum", "b", "", "norm", "x"], ["y"], epsilon=1e-6),
        own("Product", ["y", "head"], ["logits"]),
        own(
            "Accept",
            ["logits", "window", "drafts", "lengths", "active"],
            ["tokens", "n_out", "new_lengths", "logprobs", "margins"],
        ),
    ]
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in given.items()
    ]
    results = {"held": FLOAT, "tokens": INT, "new_lengths": INT, "logprobs": FLOAT}
    outputs = [helper.make_tensor_value_info(n, kind, None) for n, kind in results.items()]
    graph = helper.make_graph(nodes, "layer", inputs, outputs)
    inner = {"n": FLOAT, "ab": FLOAT, "q": FLOAT, "sum": FLOAT, "y": FLOAT, "logits": FLOAT}
    graph.value_info.extend(helper.make_tensor_value_info(n, k, None) for n, k in inner.items())
    return helper.make_model(graph, opset_imports=OPSETS, ir_version=10), given


def joined(model: onnx.ModelProto) -> onnx.ModelProto:
    graph = ir.serde.deserialize_model(model)
    join_chains(graph)
    return ir.serde.serialize_model(graph)


def test_chains_do_what_their_nodes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = layer()
    chained = joined(model)
    assert [node.op_type for node in chained.graph.node] == ["Chain", "Add", "Chain"]
    wanted = open_session(model).run(None, given)
    for isa in isas():
        monkeypatch.setenv("MTPBUILD_CPU_ISA", isa)
        found = open_session(chained).run(None, given)
        for one, other in zip(found, wanted, strict=True):
            assert one.tobytes() == other.tobytes()


def test_a_cache_is_written_in_place() -> None:
    model, given = layer()
    steps = open_session(joined(model))
    cache = ort.OrtValue.ortvalue_from_numpy(given["cache"])
    binding = steps.io_binding()
    for name, array in given.items():
        value = cache if name == "cache" else ort.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(name, value)
    binding.bind_ortvalue_output("held", cache)
    for name in ("tokens", "new_lengths", "logprobs"):
        binding.bind_output(name)
    steps.run_with_iobinding(binding)
    np.testing.assert_array_equal(cache.numpy(), open_session(model).run(["held"], given)[0])


def test_operators_in_branches_stay_nodes() -> None:
    """What a branch reads of the graph around it counts as an operand of the whole."""
    x, w = (helper.make_tensor_value_info(name, FLOAT, [4]) for name in ("x", "w"))
    flag = helper.make_tensor_value_info("f", TensorProto.BOOL, [])
    out = helper.make_tensor_value_info("out", FLOAT, [4])
    sides = [
        helper.make_graph(
            [own("Norm", ["b", "w"], [f"side{i}"], epsilon=float(i + 1))],
            f"branch{i}",
            [],
            [helper.make_tensor_value_info(f"side{i}", FLOAT, [4])],
        )
        for i in range(2)
    ]
    nodes = [
        own("Norm", ["x", "w"], ["a"], epsilon=1e-6),
        own("Norm", ["a", "w"], ["b"], epsilon=1e-6),
        helper.make_node("If", ["f"], ["c"], then_branch=sides[0], else_branch=sides[1]),
        own("Norm", ["c", "w"], ["out"], epsilon=1e-6),
    ]
    graph = helper.make_graph(nodes, "branches", [x, w, flag], [out])
    graph.value_info.extend(helper.make_tensor_value_info(n, FLOAT, [4]) for n in ("a", "b", "c"))
    model = helper.make_model(graph, opset_imports=OPSETS, ir_version=10)
    chained = joined(model)
    assert [node.op_type for node in chained.graph.node] == ["Chain", "If", "Norm"]
    given = {"x": np.arange(4, dtype=np.float32), "w": np.full(4, 2, np.float32)}
    for value in (True, False):
        every = given | {"f": np.array(value)}
        [found], [wanted] = (open_session(m).run(None, every) for m in (chained, model))
        np.testing.assert_array_equal(found, wanted)


class Axes(torch.nn.Module):
    """A sum and an arg-max that keep their axis, both beside other operators of ours."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed = torch.rms_norm(x, (4,), w, 1e-6)
        return x.sum(-1, keepdim=True) * 2, x.argmax(-1, keepdim=True) + 1, normed


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the exporter
def test_a_chain_gives_values_whose_axis_is_kept() -> None:
    """Their type is known, which onnxruntime demands of a chain's results."""
    given = {"x": torch.tensor([[1.0, 2.0, 4.0, 3.0]]), "w": torch.ones(4)}
    exported = torch.export.export(Axes(), (*given.values(),))
    how: Any = {"opset_version": OPSET, "optimize": False, "verbose": False}
    program = torch.onnx.export(exported, dynamo=True, custom_translation_table=PYTORCH, **how)
    assert program is not None
    joined_model = ir.to_proto(join_chains(program.model))
    assert "Chain" in [node.op_type for node in joined_model.graph.node]
    total, best, _ = open_session(joined_model).run(None, {k: v.numpy() for k, v in given.items()})
    assert (total, best) == (20, 3)


def one(steps: str, results: str = "2", kind: int = FLOAT, operands: int = 2) -> list[NDArray[Any]]:
    """Run a chain over x [3, 4] and w [4]."""
    names = [f"y{i}" for i in range(max(1, len(results.split())))]
    node = own("Chain", ["x", "w"], names, steps=steps, results=results, operands=operands)
    given = {"x": np.ones((3, 4), np.float32), "w": np.ones(4, np.float32)}
    inputs = [helper.make_tensor_value_info(n, FLOAT, a.shape) for n, a in given.items()]
    outputs = [helper.make_tensor_value_info(name, kind, None) for name in names]
    graph = helper.make_graph([node], "one", inputs, outputs)
    model = helper.make_model(graph, opset_imports=OPSETS, ir_version=10)
    found: list[NDArray[Any]] = open_session(model).run(None, given)
    return found


NORM = "Norm 0 1 > 2 epsilon=897988541"


def test_steps_as_text() -> None:
    [y] = one(NORM)
    np.testing.assert_allclose(y, 1.0, rtol=1e-6)
    [y] = one(NORM + "\nNorm 2 1 > 3 epsilon=897988541", "3")
    np.testing.assert_allclose(y, 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ("Nrm 0 1 > 2", "no operator Nrm"),
        ("Chain 0 1 > 2", "no operator Chain"),
        ("Norm 0 7 > 2 epsilon=1", "no value 7"),
        ("Norm 0 -1 > 2 epsilon=1", "no value -1"),
        ("Norm 0 99999999999999999999 > 2 epsilon=1", "no value 9999"),
        ("Norm 2 1 > 2 epsilon=1", "no value 2"),
        ("Norm 0 1 > 1 epsilon=1", "values out of order"),
        ("Norm 0 1 > 3 epsilon=1", "no value 3"),
        ("Norm 0 1 1 > 2 epsilon=1", "too many operands"),
        ("Norm 0 1 > 2 3 epsilon=1", "too many operands"),
        ("Norm 0 1 > 2", "attribute epsilon is missing"),
        ("Norm 0 > 2 epsilon=1", "Norm: an operand is missing"),
        ("Norm - 1 > 2 epsilon=1", "Norm: an operand is missing"),
        ("Norm 1 0 > 2 epsilon=1", r"Norm: \[4\], \[3, 4\]"),
        ("Product 0 1 1 > 2 N=1", "Product: an operand is of another type"),
        ("Norm 0 1 epsilon=1", "no value epsilon=1"),
    ],
)
def test_damaged_steps(steps: str, error: str) -> None:
    with pytest.raises(Exception, match=f"mtpbuild .*{error}|{error}"):
        one(steps)


def test_damaged_results() -> None:
    with pytest.raises(Exception, match="no result 1"):
        one(NORM, "1")
    with pytest.raises(Exception, match="no value 3"):
        one(NORM, "3")
    with pytest.raises(Exception, match="no result 2"):
        one(NORM + "\nNorm 2 1 > 3 epsilon=1", "2 2")
    with pytest.raises(Exception, match="of another type"):
        one(NORM, kind=TensorProto.FLOAT16)
    with pytest.raises(Exception, match="an operand is missing"):
        one("Norm 0 2 > 3 epsilon=1", "3", operands=3)
    with pytest.raises(Exception, match="-1 operands"):
        one(NORM, operands=-1)


@pytest.mark.parametrize(("half", "tokens"), [((1 << 23) + 1, 2**31 - 1), (1 << 20, 1 << 20)])
def test_a_result_that_no_memory_holds(half: int, tokens: int) -> None:
    """Sizes that overflow, or that are too large, are refused before anything is written."""
    slots = 128
    steps = "Places 0 - 1 2 3 > 4 5 6 7 8 offset=0 scale=1065353216"
    names = ["start", "frequencies", "tokens", "end"]
    given: dict[str, NDArray[Any]] = {"start": np.zeros(slots, np.int64)}
    given |= {"frequencies": np.ones(half, np.float32), "tokens": np.array(tokens)}
    given |= {"end": np.array(0)}
    kinds = [TensorProto.INT64, FLOAT, TensorProto.INT64, TensorProto.INT64]
    inputs = [
        helper.make_tensor_value_info(name, kind, given[name].shape)
        for name, kind in zip(names, kinds, strict=True)
    ]
    node = own("Chain", names, ["base"], steps=steps, results="6", operands=4)
    base = helper.make_tensor_value_info("base", TensorProto.INT64, None)
    graph = helper.make_graph([node], "large", inputs, [base])
    model = helper.make_model(graph, opset_imports=OPSETS, ir_version=10)
    with pytest.raises(Exception, match="mtpbuild Places: a size is negative or too large"):
        open_session(model).run(None, given)
