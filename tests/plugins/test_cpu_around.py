"""What stands around the CPU's products: a norm, a sum, experts' weights, rows of an embedding.

Each equals the operators that it takes the place of, to the bit on every instruction set.
"""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mtpbuild.plugins import embedding_nbits, experts_packed
from mtpbuild.plugins.cpu.layout import (
    gates_then_ups,
    packed_floats,
    packed_scales,
    packed_values,
    pairs_of_floats,
)
from tests.support.cpu_kernels import Operands, random_weight, run, same_everywhere

FLOAT = (np.float32,)
N, K = 100, 96


def operands(bits: int | None, rows: tuple[int, ...], outputs: int = N) -> dict[str, Any]:
    """Rows, a packed weight, the norm's weight and what is added to the product."""
    rng = np.random.default_rng(outputs)
    given: dict[str, Any] = {"x": rng.standard_normal((*rows, K), np.float32)}
    if bits is None:
        weight = torch.from_numpy(rng.standard_normal((K, outputs), np.float32))
        given |= {"values": packed_floats(weight).numpy(), "scales": None}
    else:
        values, scales, _ = random_weight(rng, (outputs, K), bits)
        given["values"] = packed_values(values).numpy()
        given["scales"] = packed_scales(scales).numpy()
    given["norm"] = rng.standard_normal(K, np.float32)
    given["sum"] = rng.standard_normal((*rows, outputs), np.float32)
    return given


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("rows", [(1,), (2, 7), (60,)])
@pytest.mark.parametrize("left", [(), ("norm",), ("sum",)])
def test_products(
    bits: int | None, rows: tuple[int, ...], left: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = operands(bits, rows) | dict.fromkeys(left)
    [got] = same_everywhere(monkeypatch, "Product", given, FLOAT, N=N, epsilon=1e-5)
    x = given["x"]
    if "norm" not in left:
        [x] = run("Norm", {"x": x, "w": given["norm"]}, FLOAT, 1, epsilon=1e-5)
    plain = given | {"x": x, "norm": None, "sum": None}
    [wanted] = run("Product", plain, FLOAT, 1, N=N)
    np.testing.assert_array_equal(got, wanted if "sum" in left else wanted + given["sum"])


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_gates(bits: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands(bits, (5,), 128)
    del given["sum"]
    [got] = same_everywhere(monkeypatch, "GatedProduct", given, FLOAT, N=128, epsilon=1e-5)
    [x] = run("Norm", {"x": given["x"], "w": given["norm"]}, FLOAT, 1, epsilon=1e-5)
    [wanted] = run("GatedProduct", given | {"x": x, "norm": None}, FLOAT, 1, N=128)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize(("name", "size"), [("norm", (95,)), ("norm", (1, 96)), ("sum", (5, 99))])
def test_damaged_operands(bits: int | None, name: str, size: tuple[int, ...]) -> None:
    given = operands(bits, (5,)) | {name: np.zeros(size, np.float32)}
    with pytest.raises(Exception, match="mtpbuild Product: "):
        run("Product", given, FLOAT, 1, N=N, epsilon=1e-5)


X, E, INNER, CHOSEN = 5, 96, 64, 3


def mixture(bits: int | None, tokens: tuple[int, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(len(tokens))
    given: dict[str, Any] = {
        "x": rng.standard_normal((*tokens, E), np.float32),
        "weights": rng.standard_normal((*tokens, CHOSEN), np.float32),
        "ids": rng.integers(-1, X, (*tokens, CHOSEN)).astype(np.int32),
    }
    if bits is None:
        both = torch.from_numpy(rng.standard_normal((X, E, 2 * INNER), np.float32))
        down = torch.from_numpy(rng.standard_normal((X, INNER, E), np.float32))
        given |= {"both": packed_floats(pairs_of_floats(both)).numpy(), "both_scales": None}
        given |= {"down": packed_floats(down).numpy(), "down_scales": None}
    else:
        for name, shape in {"both": (X, 2 * INNER, E), "down": (X, E, INNER)}.items():
            values, scales, _ = random_weight(rng, shape, bits)
            if name == "both":
                values, scales = gates_then_ups(values), gates_then_ups(scales)
            given[name] = packed_values(values).numpy()
            given[f"{name}_scales"] = packed_scales(scales).numpy()
    given["sum"] = rng.standard_normal((*tokens, E), np.float32)
    return given


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("tokens", [(1, 1), (2, 4), (70,)])
def test_mixtures(
    bits: int | None, tokens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token's sum is in the order of its ids; of an id that is nobody's nothing is added."""
    given = mixture(bits, tokens)
    [got] = same_everywhere(monkeypatch, "Experts", given, FLOAT)
    x, ids = given["x"].reshape(-1, E), given["ids"].reshape(-1, CHOSEN)
    weights, wanted = given["weights"].reshape(-1, CHOSEN), np.zeros_like(x)
    for i in range(CHOSEN):
        one = given | {"x": x, "ids": ids[:, i : i + 1].clip(0), "sum": None}
        [made] = run("Experts", one | {"weights": np.ones_like(weights[:, :1])}, FLOAT, 1)
        share = wanted + made * weights[:, i : i + 1]
        wanted = np.where(ids[:, i : i + 1] < 0, wanted, share)
    np.testing.assert_array_equal(got.reshape(-1, E), wanted + given["sum"].reshape(-1, E))
    [without] = run("Experts", given | {"sum": None}, FLOAT, 1)
    np.testing.assert_array_equal(without.reshape(-1, E), wanted)


@pytest.mark.parametrize("bits", [None, 8])
def test_mixtures_by_definition(bits: int | None) -> None:
    """The op's reference agrees as far as rounding goes."""
    given = mixture(bits, (2, 4))
    [got] = run("Experts", given | {"sum": None}, FLOAT, 1)
    names = ("x", "weights", "ids", "both", "both_scales", "down", "down_scales")
    parts = [None if given[n] is None else torch.from_numpy(given[n]) for n in names]
    wanted = experts_packed(*parts).numpy()
    close = 2e-5 if bits is None else 0.03  # the kernels round rows to int8
    assert np.abs(got - wanted).max() < close * np.abs(wanted).max()


WRONG: dict[str, NDArray[Any]] = {
    "ids": np.full((2, 4, CHOSEN), X, np.int32),
    "weights": np.zeros((2, 4, CHOSEN - 1), np.float32),
    "x": np.zeros((2, 3, E), np.float32),
    "sum": np.zeros((2, 4, E - 1), np.float32),
}


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("name", [*WRONG])
def test_damaged_mixtures(bits: int | None, name: str) -> None:
    with pytest.raises(Exception, match="mtpbuild Experts: "):
        run("Experts", mixture(bits, (2, 4)) | {name: WRONG[name]}, FLOAT, 1)


def embedding() -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    return {
        "tokens": np.array([[0, 6, 3], [3, 3, 1]]),
        "values": rng.integers(0, 256, (7, 2, 32)).astype(np.uint8),
        "scales": np.array([0.01, -2.0, 6e-8, 65504.0] * 4, np.float16)[:14].reshape(7, 2),
    }


def test_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    given: Operands = embedding()
    [got] = same_everywhere(monkeypatch, "Embedding", given, FLOAT)
    wanted = embedding_nbits(*map(torch.from_numpy, embedding().values())).numpy()
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", np.array([7])),
        ("tokens", np.array([-1])),
        ("values", np.zeros((7, 2, 31), np.uint8)),
        ("scales", np.zeros((7, 1), np.float16)),
    ],
)
def test_a_damaged_embedding(name: str, value: NDArray[Any]) -> None:
    with pytest.raises(Exception, match="mtpbuild Embedding: "):
        run("Embedding", embedding() | {name: value}, FLOAT, 1)


@pytest.mark.parametrize("op", ["Product", "GatedProduct"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_weight_without_inputs(op: str, bits: int) -> None:
    given: dict[str, NDArray[Any]] = {
        "x": np.zeros((1, 0), np.float32),
        "v": np.zeros((2, 0, 128 * bits), np.uint8),
        "s": np.zeros((2, 0, 32), np.float16),
    }
    with pytest.raises(Exception, match=f"mtpbuild {op}: 64 outputs in 2 panels of 32, 0 blocks"):
        run(op, given, FLOAT, 1, N=64)
