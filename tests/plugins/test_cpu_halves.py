"""Caches in bfloat16: rows are rounded once, and read as what they were rounded to."""

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper

from mtpbuild.plugins import grouped_rows_write, mla_rows_write
from mtpbuild.runtime.cpu_library import DOMAIN
from tests.support.cpu_kernels import LIBRARY, check_refused, run
from tests.support.isas import isas

F = np.float32
Given = dict[str, Any]


def halved(x: NDArray[Any]) -> NDArray[np.float32]:
    """Round to bfloat16, as PyTorch does."""
    rounded: NDArray[np.float32] = torch.from_numpy(x).bfloat16().float().numpy()
    return rounded


def run_halved(op: str, given: Given, results: int, **how: Any) -> list[NDArray[Any]]:
    """Run a node whose operand `cache` is bfloat16, and its third result; on each set, alike."""
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), [None] * a.ndim)
        for n, a in given.items()
    ]
    outputs = [
        helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, None) for i in range(results)
    ]
    names = ["halves" if name == "cache" else name for name in given]
    made = ["held" if i == 2 else f"y{i}" for i in range(results)]
    nodes = [
        helper.make_node("Cast", ["cache"], ["halves"], to=TensorProto.BFLOAT16),
        helper.make_node(op, names, made, domain=DOMAIN, **how),
    ]
    if results == 3:
        nodes.append(helper.make_node("Cast", ["held"], ["y2"], to=TensorProto.FLOAT))
    graph = helper.make_graph(nodes, "halves", inputs, outputs)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    first: list[NDArray[Any]] | None = None
    with pytest.MonkeyPatch.context() as patch:
        for isa in isas():
            patch.setenv("MTPBUILD_CPU_ISA", isa)
            options = ort.SessionOptions()
            options.intra_op_num_threads, options.log_severity_level = 2, 4
            options.register_custom_ops_library(str(LIBRARY))
            found = [np.asarray(y) for y in ort.InferenceSession(model, options).run(None, given)]
            first = first or found
            assert [each.tobytes() for each in found] == [each.tobytes() for each in first]
    assert first is not None
    return first


@pytest.mark.parametrize(
    ("B", "H", "T", "C", "S", "written"),
    [(2, 3, 4, 40, 200, 0), (1, 4, 1, 64, 1300, 1), (1, 2, 70, 24, 90, 0)],
)
def test_attention(B: int, H: int, T: int, C: int, S: int, written: int) -> None:
    """It equals the one over fp32 rows that bfloat16 holds, to the bit."""
    rng = np.random.default_rng(S)
    given: Given = {
        "q": rng.standard_normal((B, H, T, C), F),
        "cache": halved(rng.standard_normal((B, 1, S, C), F)),
        "fresh": halved(rng.standard_normal((B, 1, T, C), F)),
        "base": rng.integers(1, S - T, B),
        "first": np.zeros(B, np.int64),
    }
    how = {"scale": 0.3, "groups": 1, "values": 0, "latent": 16, "written": written}
    [got] = run_halved("Attention", given, 1, **how)
    [wanted] = run("Attention", given, (F,), 1, **how)
    np.testing.assert_array_equal(got, wanted)
    for kind in (np.int32, np.float16):
        other = given | {"cache": given["cache"].astype(kind)}
        check_refused("a cache of another type", "Attention", other, (F,), **how)


def check_rows(op: str, given: Given, definition: Any, order: tuple[str, ...], **how: Any) -> None:
    q, fresh, cache = run_halved(f"{op}Bf16", given, 3, **how)
    plain = run(op, given, (F, F, F), 1, **how)
    np.testing.assert_array_equal(q, plain[0])
    np.testing.assert_array_equal(fresh, halved(plain[1]))
    np.testing.assert_array_equal(cache, halved(plain[2]))
    tensors = {name: torch.from_numpy(array) for name, array in given.items()}
    tensors["cache"] = tensors["cache"].bfloat16()
    wanted = definition([tensors[name] for name in order])
    assert wanted[2].dtype == torch.bfloat16
    for found, each in zip((q, fresh, cache), wanted, strict=True):
        np.testing.assert_allclose(found, each.float().numpy(), rtol=2**-7, atol=1e-5)


def test_latent_rows() -> None:
    rng = np.random.default_rng(0)
    B, T, Q, latent, half, S = 2, 3, 40, 24, 6, 9
    width = latent + 2 * half
    shapes: dict[str, tuple[int, ...]] = {
        "a": (B, T, Q + width),
        "kv_norm": (latent,),
        "cos": (B, T, half),
    }
    shapes |= {"sin": (B, T, half), "q_norm": (Q,), "cache": (B, 1, S, width)}
    given: Given = {name: rng.standard_normal(s).astype(F) for name, s in shapes.items()}
    given["start"] = np.array([0, S - T])
    order = ("a", "q_norm", "kv_norm", "cos", "sin", "cache", "start")
    given = {name: given[name] for name in order}

    def definition(operands: list[torch.Tensor]) -> Any:
        return mla_rows_write(*operands, 1e-6, True)

    check_rows("LatentRows", given, definition, order, epsilon=1e-6, interleaved=1)


def test_grouped_rows() -> None:
    rng = np.random.default_rng(0)
    B, T, H, G, D, half, S = 2, 3, 4, 2, 24, 6, 9
    shapes: dict[str, tuple[int, ...]] = {"a": (B, T, (H + 2 * G) * D)}
    shapes |= {"cos": (B, T, half), "sin": (B, T, half)}
    shapes |= {"q_norm": (D,), "k_norm": (D,), "cache": (B, 1, S, 2 * G * D)}
    given: Given = {name: rng.standard_normal(s).astype(F) for name, s in shapes.items()}
    given["start"] = np.array([0, S - T])
    order = ("a", "q_norm", "k_norm", "cos", "sin", "cache", "start")
    given = {name: given[name] for name in order}

    def definition(operands: list[torch.Tensor]) -> Any:
        return grouped_rows_write(*operands, H, G, D, 1e-6)

    how = {"heads": H, "groups": G, "width": D, "epsilon": 1e-6, "plus_one": 0}
    check_rows("GroupedRows", given, definition, order, **how)


def test_rounding() -> None:
    """Ties to even, no overflow but where there is one, a NaN stays one."""
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF800000, 0x80000001])
    x = np.concatenate([bits.astype(np.uint32).view(F), np.array([np.nan], F)])
    a = np.concatenate([np.zeros((1, 1, 7), F), x.reshape(1, 1, 7)], -1)  # a key, then values
    given: Given = {"a": np.concatenate([np.zeros((1, 1, 7), F), a], -1)}
    given |= {name: np.zeros((1, 1, 0), F) for name in ("cos", "sin")}
    given |= {"cache": np.zeros((1, 1, 2, 14), F), "start": np.array([1])}
    graph = {"heads": 1, "groups": 1, "width": 7, "epsilon": 1e-6, "plus_one": 0}
    names = ("a", "q_norm", "k_norm", "cos", "sin", "cache", "start")
    ones = {name: np.ones(7, F) for name in ("q_norm", "k_norm")}
    ordered = {name: (given | ones)[name] for name in names}
    _, fresh, _ = run_halved("GroupedRowsBf16", ordered, 3, **graph)
    np.testing.assert_array_equal(fresh[0, 0, 0, 7:], halved(x))
