"""What stands around the CPU's products: a norm, a sum, experts' weights, rows of an embedding.

Each equals the operators that it takes the place of, to the bit on every instruction set.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mtpbuild.plugins import embedding_nbits, experts_packed
from mtpbuild.plugins.cpu.layout import (
    pack_floats,
    pack_pairs,
    pack_scales,
    pack_values,
    reorder_gates,
)
from tests.support import exact
from tests.support.cpu_kernels import Operands, check_refused, random_weight, run, same_everywhere

FLOAT = (np.float32,)
N, K = 100, 96


def operands(bits: int | None, rows: tuple[int, ...], outputs: int = N) -> dict[str, Any]:
    """Rows, a packed weight, the norm's weight and what is added to the product."""
    rng = np.random.default_rng(outputs)
    given: dict[str, Any] = {"x": rng.standard_normal((*rows, K), np.float32)}
    if bits is None:
        weight = torch.from_numpy(rng.standard_normal((K, outputs), np.float32))
        given |= {"values": pack_floats(weight).numpy(), "scales": None}
    else:
        values, scales, _ = random_weight(rng, (outputs, K), bits)
        given["values"] = pack_values(values).numpy()
        given["scales"] = pack_scales(scales).numpy()
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
    check_refused("", "Product", given, FLOAT, N=N, epsilon=1e-5)


X, CHOSEN = 5, 3
MIXTURES = [(None, 96, 64), (None, 50, 40), (None, 33, 170), (4, 96, 64), (8, 96, 64)]
Expert = Callable[[int, NDArray[np.float32]], NDArray[np.float32]]


def mixture(
    bits: int | None, E: int, inner: int, tokens: tuple[int, ...]
) -> tuple[dict[str, Any], Expert]:
    """Operands, and what an expert makes of a row; of 70 tokens 60 go to one expert first."""
    rng = np.random.default_rng(len(tokens))
    given: dict[str, Any] = {
        "x": rng.standard_normal((*tokens, E), np.float32),
        "weights": rng.standard_normal((*tokens, CHOSEN), np.float32),
        "ids": rng.integers(-1, X, (*tokens, CHOSEN)).astype(np.int32),
    }
    if tokens == (70,):
        given["ids"][:60, 0] = 3
    if bits is None:
        both = rng.standard_normal((X, E, 2 * inner), np.float32)
        down = rng.standard_normal((X, inner, E), np.float32)
        pairs = pack_pairs(torch.from_numpy(both))
        given |= {"both": pack_floats(pairs).numpy(), "both_scales": None}
        given |= {"down": pack_floats(torch.from_numpy(down)).numpy(), "down_scales": None}

        def floats(e: int, x: NDArray[np.float32]) -> NDArray[np.float32]:
            h = exact.float_product(x, both[e])
            return exact.float_product(exact.gated(h[:, :inner], h[:, inner:]), down[e])

        return given | {"sum": rng.standard_normal((*tokens, E), np.float32)}, floats
    values, scales, gates_ups = random_weight(rng, (X, 2 * inner, E), bits)
    given["both"] = pack_values(reorder_gates(values)).numpy()
    given["both_scales"] = pack_scales(reorder_gates(scales)).numpy()
    down_values, down_scales, downs = random_weight(rng, (X, E, inner), bits)
    given["down"] = pack_values(down_values).numpy()
    given["down_scales"] = pack_scales(down_scales).numpy()

    def integers(e: int, x: NDArray[np.float32]) -> NDArray[np.float32]:
        h = exact.product(x, gates_ups[e], scales[e].numpy())
        return exact.product(exact.gated(h[:, ::2], h[:, 1::2]), downs[e], down_scales[e].numpy())

    return given | {"sum": rng.standard_normal((*tokens, E), np.float32)}, integers


@pytest.mark.parametrize(("bits", "E", "inner"), MIXTURES)
@pytest.mark.parametrize("tokens", [(1, 1), (2, 4), (70,)])
def test_mixtures(
    bits: int | None, E: int, inner: int, tokens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token's sum is in the order of its ids; of an id that is nobody's nothing is added."""
    given, expert = mixture(bits, E, inner, tokens)
    [got] = same_everywhere(monkeypatch, "Experts", given, FLOAT)
    [without] = run("Experts", given | {"sum": None}, FLOAT, 1)
    np.testing.assert_array_equal(got, without + given["sum"])
    x, ids, weights = (
        given[name].reshape(-1, given[name].shape[-1]) for name in ("x", "ids", "weights")
    )
    for row in range(0, len(x), 1 + len(x) // 10):
        one, wanted = slice(row, row + 1), np.zeros((1, E), np.float32)
        for e, weight in zip(ids[row], weights[row], strict=True):
            wanted = wanted if e < 0 else wanted + expert(e, x[one]) * weight
        np.testing.assert_array_equal(without.reshape(-1, E)[one], wanted)
        own = given | {"x": x[one], "ids": ids[one], "weights": weights[one], "sum": None}
        [alone] = run("Experts", own, FLOAT, 1)
        np.testing.assert_array_equal(alone, wanted)


@pytest.mark.parametrize("bits", [None, 8])
def test_mixtures_by_definition(bits: int | None) -> None:
    """The op's reference agrees as far as rounding goes."""
    given, _ = mixture(bits, 96, 64, (2, 4))
    [got] = run("Experts", given | {"sum": None}, FLOAT, 1)
    names = ("x", "weights", "ids", "both", "both_scales", "down", "down_scales")
    parts = [None if given[n] is None else torch.from_numpy(given[n]) for n in names]
    wanted = experts_packed(*parts).numpy()
    close = 2e-5 if bits is None else 0.03  # the kernels round rows to int8
    assert np.abs(got - wanted).max() < close * np.abs(wanted).max()


WRONG: dict[str, list[tuple[int, ...]]] = {
    "x": [(2, 3, 96), (70, 95), (70, 1), (2, 70, 96)],
    "weights": [(2, 4, 2), (70,), (70, 2)],
    "ids": [(69, 3), (70,)],
    "sum": [(2, 4, 95)],
    "both": [(5, 3, 96, 32), (5, 4, 95, 32), (4, 4, 96, 32), (5, 4, 96, 31), (20, 96, 32)],
    "down": [(5, 2, 64, 32), (5, 3, 0, 32), (5, 3, 65, 32), (5, 3, 64, 16), (15, 64, 32)],
}


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("name", WRONG)
def test_damaged_mixtures(bits: int | None, name: str) -> None:
    given, _ = mixture(bits, 96, 64, (70,))
    for shape in WRONG[name]:
        check_refused("", "Experts", given | {name: np.zeros(shape, given[name].dtype)}, FLOAT)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("expert", [-2, X, (1 << 31) - 1, -(1 << 31)])
def test_an_expert_that_is_not_there(bits: int | None, expert: int) -> None:
    given, _ = mixture(bits, 96, 64, (70,))
    check_refused(
        "no expert", "Experts", given | {"ids": np.full((70, CHOSEN), expert, np.int32)}, FLOAT
    )


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


@pytest.mark.parametrize("bits", [None, 8])
def test_rows_of_a_packed_weight(bits: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what the reference unpacks; also of a last panel that isn't full."""
    given = {name: operands(bits, (1,))[name] for name in ("values", "scales")}
    tokens = np.array([[0, 31, 32, N - 1], [5, 47, 64, 98]])
    [got] = same_everywhere(monkeypatch, "Embedding", {"tokens": tokens} | given, FLOAT, N=N)
    parts = (None if part is None else torch.from_numpy(part) for part in given.values())
    wanted = embedding_nbits(torch.from_numpy(tokens), *parts, packed=N).numpy()
    np.testing.assert_array_equal(got, wanted)
    check_refused("no token 100", "Embedding", {"tokens": tokens + 100} | given, FLOAT, N=N)


def test_rows_of_another_packed_weight() -> None:
    given = {name: operands(4, (1,))[name] for name in ("values", "scales")}
    tokens = {"tokens": np.array([0])}
    check_refused("rows of a weight that is not", "Embedding", tokens | given, FLOAT, N=N)


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
    check_refused("", "Embedding", embedding() | {name: value}, FLOAT)


@pytest.mark.parametrize("op", ["Product", "GatedProduct"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_weight_without_inputs(op: str, bits: int) -> None:
    given: dict[str, NDArray[Any]] = {
        "x": np.zeros((1, 0), np.float32),
        "v": np.zeros((2, 0, 128 * bits), np.uint8),
        "s": np.zeros((2, 0, 32), np.float16),
    }
    check_refused("64 outputs in 2 panels of 32, 0 blocks", op, given, FLOAT, N=64)
