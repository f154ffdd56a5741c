"""Products of the CPU's kernels, and what stands around them: to the bit, on every processor's set.

A norm, a sum, gates, experts' weights and rows of an embedding equal the operators that they take
the place of.
"""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mtpbuild.plugins import embedding_nbits, experts_packed, product_packed
from mtpbuild.plugins.cpu.layout import (
    dequantise,
    pack_floats,
    pack_scales,
    pack_values,
    unpack_floats,
    unpack_scales,
    unpack_values,
    with_offsets,
)
from tests.support import exact
from tests.support.cpu_kernels import Operands, check_refused, run, same_everywhere
from tests.support.cpu_weights import (
    E2M1,
    FLOATS,
    FP4,
    INTEGERS,
    KINDS,
    OFFSET_KINDS,
    draw_experts,
    draw_packed,
    draw_stored,
    store,
    store_fp4,
)

F = np.float32
FLOAT = (np.float32,)
N, K = 100, 96
SIZES = [(1, 32, 32), (2, 33, 64), (3, 100, 96), (7, 64, 192), (25, 577, 320)]
FLOAT_SIZES = [(1, 1, 5), (1, 300, 40), (3, 31, 96), (5, 100, 7), (60, 129, 300), (7, 577, 64)]
CASES = [(kind, *sizes) for kind in (*INTEGERS, FP4, *OFFSET_KINDS) for sizes in SIZES]
CASES += [(FLOATS, *sizes) for sizes in FLOAT_SIZES]


def assert_same_bits(got: NDArray[Any], wanted: NDArray[Any]) -> None:
    np.testing.assert_array_equal(got.view(np.int32), wanted.view(np.int32))


def tensors(given: Operands) -> list[Any]:
    return [None if x is None else torch.as_tensor(x) for x in given.values()]


def product_operands(
    kind: str, M: int, N: int, K: int
) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """Rows and a weight, and their product by definition."""
    rng = np.random.default_rng(M + N + K)
    weight = draw_packed(rng, kind, (N, K))
    x = rng.standard_normal((M, K), np.float32)
    if kind != FLOATS:
        x[0, :32] = 0.0  # a block without a largest input
        x[-1, -32:] *= 1e-35  # and one that is too small to be scaled
    return {"x": x, "values": weight.values, "scales": weight.scales}, weight.multiply(x)


@pytest.mark.parametrize(("kind", "M", "N", "K"), CASES)
def test_products(kind: str, M: int, N: int, K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's result is the definition's, whatever rows are beside it."""
    given, wanted = product_operands(kind, M, N, K)
    [got] = same_everywhere(monkeypatch, "Product", given, FLOAT, N=N)
    assert_same_bits(got, wanted)
    for first, end in ((0, 1), (M - 1, M), (M // 2, M)):
        [some] = run("Product", given | {"x": given["x"][None, first:end]}, FLOAT, 2, N=N)
        assert_same_bits(some[0], wanted[first:end])
    plain = product_packed(*tensors(given), N).numpy()
    close = 1e-5 if kind == FLOATS else 0.02  # the kernels round rows to int8
    assert np.abs(got - plain).max() < close * np.abs(plain).max() + 1e-6


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeroed", [False, True])
def test_extreme_integers(bits: int, zeroed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of the largest numbers are where 16 bits would not do; sums less zeros are exact."""
    N, K, half = 64, 128, 1 << bits - 1
    codes = np.where(np.arange(N * K).reshape(N, K // 32, 32) % 3, 0, 2 * half - 1)
    codes[N // 2 :] = 2 * half - 1
    x = np.where(np.arange(4 * K).reshape(4, K) % 2, F(3), F(-3))
    x[2:] = [[3.0], [-3.0]]  # the sums of a whole block are the largest ones, too
    scales = np.full((N, K // 32), 0.5, np.float16)
    integers = codes.astype(np.int32) - half
    stored = torch.from_numpy(scales)
    if zeroed:
        zeros = np.where(np.arange(scales.size).reshape(scales.shape) % 2, -half, half - 1)
        integers = integers - zeros[..., None].astype(np.int32)
        stored = with_offsets(stored, torch.from_numpy(zeros.astype(np.int8)))
    given = {"x": x, "values": pack_values(store(codes, bits)).numpy()}
    given["scales"] = pack_scales(stored).numpy()
    [got] = same_everywhere(monkeypatch, "Product", given, FLOAT, N=N)
    np.testing.assert_array_equal(got, exact.product(x, integers, scales))


@pytest.mark.parametrize(
    ("fours", "eights", "offsets"),
    [(32, 32, ""), (64, 33, ""), (96, 300, ""), (64, 33, " zeros")],
)
def test_products_of_both_widths(
    fours: int, eights: int, offsets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last panels of an int4 weight may be int8, each in the place of two."""
    rng, K = np.random.default_rng(fours), 96
    x = rng.standard_normal((5, K), np.float32)
    four, eight = (
        draw_packed(rng, kind + offsets, (outputs, K))
        for kind, outputs in (("int4", fours), ("int8", eights))
    )
    values = np.concatenate([four.values, eight.values.reshape(-1, K // 32, 512)])
    assert four.scales is not None
    assert eight.scales is not None
    given = {"x": x, "values": values, "scales": np.concatenate([four.scales, eight.scales])}
    [got] = same_everywhere(monkeypatch, "Product", given, FLOAT, N=fours + eights)
    wanted = np.concatenate([four.multiply(x), eight.multiply(x)], axis=1)
    np.testing.assert_array_equal(got, wanted)
    plain = product_packed(*tensors(given), fours + eights).numpy()
    np.testing.assert_allclose(got, plain, rtol=0.1, atol=0.5)
    check_refused("", "Product", given, FLOAT, N=fours + eights + 32)


@pytest.mark.parametrize("kind", [*INTEGERS, FP4])
def test_numbers_of_rows(kind: str) -> None:
    """Kernels take rows in groups, and a prompt's rows in several pieces."""
    given, wanted = product_operands(kind, 25, 200, 256)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 12, 25):
        [got] = run("Product", given | {"x": given["x"][25 - rows :][None]}, FLOAT, 2, N=200)
        np.testing.assert_array_equal(got[0], wanted[25 - rows :])
    given, wanted = product_operands(kind, 600, 96, 1024)
    np.testing.assert_array_equal(run("Product", given, FLOAT, 2, N=96)[0], wanted)


@pytest.mark.parametrize(
    ("kind", "M", "inner", "K"),
    [
        *((kind, *sizes) for kind in (*INTEGERS, FP4) for sizes in [(1, 32, 64), (7, 96, 192)]),
        *((kind, 100, 64, 96) for kind in (*INTEGERS, FP4)),
        *((kind, 7, 96, 96) for kind in OFFSET_KINDS),
        *((FLOATS, *sizes) for sizes in [(1, 32, 20), (7, 288, 64), (100, 96, 31)]),
    ],
)
def test_gated_products(
    kind: str, M: int, inner: int, K: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, both = product_operands(kind, M, 2 * inner, K)
    [got] = same_everywhere(monkeypatch, "GatedProduct", given, FLOAT, N=2 * inner)
    assert_same_bits(got, exact.gated(both[:, :inner], both[:, inner:]))
    for outputs in (2 * inner - 1, 2 * inner - 64, 0, 1 << 62):
        check_refused("", "GatedProduct", given, FLOAT, N=outputs)
    normed = given | {"norm": np.random.default_rng(0).standard_normal(K, np.float32)}
    [got] = same_everywhere(monkeypatch, "GatedProduct", normed, FLOAT, N=2 * inner, epsilon=1e-5)
    [x] = run("Norm", {"x": given["x"], "w": normed["norm"]}, FLOAT, 1, epsilon=1e-5)
    [wanted] = run("GatedProduct", given | {"x": x}, FLOAT, 1, N=2 * inner)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("x", "w"),
    [
        ((1, 40), (40, 7)),
        ((5, 96), (96, 100)),
        ((2, 3, 64), (64, 33)),
        ((50, 17), (17, 130)),
        ((2, 4, 3, 32), (4, 32, 64)),
        ((1, 3, 7, 20), (3, 20, 19)),
    ],
)
def test_float_products(
    x: tuple[int, ...], w: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight that is not packed; by head it equals the packed one."""
    rng = np.random.default_rng(len(x))
    given = {"x": rng.standard_normal(x, np.float32), "w": rng.standard_normal(w, np.float32)}
    [got] = same_everywhere(monkeypatch, "Product", given, FLOAT)
    assert_same_bits(got, exact.float_product(given["x"], given["w"]))
    last = {"x": given["x"][..., -1:, :], "w": given["w"]}
    np.testing.assert_array_equal(run("Product", last, FLOAT, 1)[0], got[..., -1:, :])
    panels = pack_floats(torch.from_numpy(given["w"])).numpy()
    [packed] = same_everywhere(monkeypatch, "Product", given | {"w": panels}, FLOAT, N=w[-1])
    assert_same_bits(packed, got)


def test_sums_of_nothing() -> None:
    """No inputs, or no rows: what a product of them is, and no byte is read."""
    x, w = np.zeros((3, 0), F), np.zeros((2, 0, 32), F)
    assert_same_bits(run("Product", {"x": x, "w": w}, FLOAT, 1, N=40)[0], np.zeros((3, 40), F))
    for kind in (FLOATS, "int8"):
        given = product_operands(kind, 1, 40, 64)[0] | {"x": np.zeros((0, 64), F)}
        assert run("Product", given, FLOAT, 1, N=40)[0].shape == (0, 40)


@pytest.mark.parametrize("kind", [*INTEGERS, FP4, *OFFSET_KINDS])
def test_packing_is_undone(kind: str) -> None:
    weight = draw_stored(np.random.default_rng(0), kind, (3, 70, 96))
    packed, factors = pack_values(weight.values), pack_scales(weight.scales)
    assert packed.shape == (3, 3, 3, 128 * weight.bits)
    wide = {"zeros": 48, "minima": 64, FP4: 16}.get(kind.split()[-1], 32)
    assert factors.shape == (3, 3, 3, wide)
    assert torch.equal(unpack_values(packed, 70), weight.values)
    assert torch.equal(unpack_scales(factors, 70), weight.scales)
    meant = weight.integers * weight.factors[..., None].astype(F)
    if weight.minima is not None:
        meant = meant + weight.minima[..., None].astype(F)
    numbers = dequantise(weight.values, weight.scales, weight.bits)
    np.testing.assert_array_equal(numbers, meant.reshape(3, 70, 96))


@pytest.mark.parametrize("shape", [(7, 70), (3, 7, 64), (2, 5, 33)])
def test_packing_floats_is_undone(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    assert torch.equal(unpack_floats(pack_floats(weight), shape[-1]), weight)


def test_layout_in_8_bits() -> None:
    """Output 41, the tenth of panel 1, has input 4 * 5 + 3 of a block in line 2 * 5 + 0."""
    values = draw_stored(np.random.default_rng(0), "int8", (3, 70, 96)).values
    assert pack_values(values)[2, 1, 2, 64 * 10 + 4 * 9 + 3] == values[2, 41, 2, 23]


def test_layout_in_4_bits() -> None:
    """Output 51, the 20th of panel 1, has inputs 8 * 3 + 1 and 8 * 3 + 5 of a block in one byte."""
    values = draw_stored(np.random.default_rng(0), "int4", (3, 70, 96)).values
    byte = pack_values(values)[2, 1, 2, 64 * 7 + 4 * 3 + 1]
    assert byte & 0xF == values[2, 51, 2, 12] >> 4
    assert byte >> 4 == values[2, 51, 2, 14] >> 4


def test_many_scales_of_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subnormal and negative scales are what fp16 says."""
    bits = np.array([0x0001, 0x03FF, 0x8001, 0x0400, 0x7BFF, 0xFBFF, 0x8000, 0x3C00], np.uint16)
    scales = np.tile(bits, 4).view(np.float16).reshape(32, 1)
    weight = draw_stored(np.random.default_rng(3), "int8", (32, 32))
    x = np.random.default_rng(4).standard_normal((1, 32), np.float32)
    given = {"x": x, "values": pack_values(weight.values).numpy()}
    given["scales"] = pack_scales(torch.from_numpy(scales)).numpy()
    [got] = same_everywhere(monkeypatch, "Product", given, FLOAT, N=32)
    np.testing.assert_array_equal(got, exact.product(x, weight.integers, scales))


def test_codes_of_fp4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each code in each place of a block: a row that is 127 there alone reads its number."""
    codes = (np.arange(32)[:, None] // 2 + np.arange(32)).reshape(32, 1, 32) % 16
    weight = store_fp4(codes, np.full((32, 1), 127))
    given = {"x": 127 * np.eye(32, dtype=np.float32), "values": pack_values(weight.values).numpy()}
    given["scales"] = pack_scales(weight.scales).numpy()
    [got] = same_everywhere(monkeypatch, "Product", given, FLOAT, N=32)
    np.testing.assert_array_equal(got, 127 * E2M1[codes[:, 0].T])


def test_extreme_fp4(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest sums of a block's halves are where 16 bits would not do without a correction."""
    codes = np.where(np.arange(64 * 128).reshape(64, 4, 32) // 2 % 2, 15, 7)
    codes[32:] = 7
    codes[48:] = 15
    weight = store_fp4(codes, np.full((64, 4), 120))
    x = np.where(np.arange(4 * 128).reshape(4, 128) // 2 % 2, F(3), F(-3))
    x[2:] = [[3.0], [-3.0]]
    given = {"x": x, "values": pack_values(weight.values).numpy()}
    given["scales"] = pack_scales(weight.scales).numpy()
    [got] = same_everywhere(monkeypatch, "Product", given, FLOAT, N=64)
    np.testing.assert_array_equal(got, weight.multiply(x))


def test_all_powers_of_fp4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales beyond fp16's range are exact, too, and 2 ** -127, which is subnormal in fp32."""
    exponents = np.resize([0, 1, 2, 97, 112, 127, 142, 143, 200, 252], (32, 1))
    codes = np.random.default_rng(0).integers(0, 16, (32, 1, 32))
    weight = store_fp4(codes, exponents)
    packed = {"values": pack_values(weight.values).numpy()}
    packed["scales"] = pack_scales(weight.scales).numpy()
    tokens = {"tokens": np.arange(32)[None]}
    [rows] = same_everywhere(monkeypatch, "Embedding", tokens | packed, FLOAT, N=32)
    wanted = weight.integers[:, 0].astype(np.float64) * np.ldexp(1.0, exponents - 127)
    np.testing.assert_array_equal(rows[0], wanted.astype(F))
    for factor in (F(2.0**100), F(2.0**-100)):  # subnormal and infinite results are left out
        some = exponents[:, 0] < 130 if factor > 1 else exponents[:, 0] > 130
        x = {"x": factor * np.random.default_rng(1).standard_normal((3, 32), np.float32)}
        [got] = same_everywhere(monkeypatch, "Product", x | packed, FLOAT, N=32)
        wanted = store_fp4(codes[some], exponents[some]).multiply(x["x"])
        np.testing.assert_array_equal(got[:, some], wanted)


def operands(kind: str, rows: tuple[int, ...]) -> dict[str, Any]:
    """Rows, a packed weight, the norm's weight and what is added to the product."""
    rng = np.random.default_rng(N)
    weight = draw_packed(rng, kind, (N, K))
    return {
        "x": rng.standard_normal((*rows, K), np.float32),
        **{"values": weight.values, "scales": weight.scales},
        "norm": rng.standard_normal(K, np.float32),
        "sum": rng.standard_normal((*rows, N), np.float32),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [(1,), (2, 7), (60,)])
@pytest.mark.parametrize("left", [(), ("norm",), ("sum",), ("bias",)])
def test_norms_and_sums(
    kind: str, rows: tuple[int, ...], left: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product takes rows that it normalises, and adds a sum or one number for each output."""
    given = operands(kind, rows)
    if left == ("bias",):
        given["sum"] = given["sum"].reshape(-1, N)[0].copy()
    else:
        given |= dict.fromkeys(left)
    [got] = same_everywhere(monkeypatch, "Product", given, FLOAT, N=N, epsilon=1e-5)
    x = given["x"]
    if given["norm"] is not None:
        [x] = run("Norm", {"x": x, "w": given["norm"]}, FLOAT, 1, epsilon=1e-5)
    plain = given | {"x": x, "norm": None, "sum": None}
    [wanted] = run("Product", plain, FLOAT, 1, N=N)
    np.testing.assert_array_equal(got, wanted if "sum" in left else wanted + given["sum"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "size"), [("norm", (95,)), ("norm", (1, 96)), ("sum", (5, 99))])
def test_damaged_norms_and_sums(kind: str, name: str, size: tuple[int, ...]) -> None:
    given = operands(kind, (5,)) | {name: np.zeros(size, F)}
    check_refused("", "Product", given, FLOAT, N=N, epsilon=1e-5)


X, CHOSEN = 5, 3
MIXTURES = [(FLOATS, 96, 64), (FLOATS, 50, 40), (FLOATS, 33, 170)]
MIXTURES += [(kind, 96, 64) for kind in (*INTEGERS, FP4, *OFFSET_KINDS)]


def mixture(kind: str, E: int, inner: int, tokens: tuple[int, ...]) -> tuple[dict[str, Any], Any]:
    """Operands, and what an expert makes of a row; of 70 tokens 60 go to one expert first."""
    rng = np.random.default_rng(len(tokens))
    given: dict[str, Any] = {
        "x": rng.standard_normal((*tokens, E), np.float32),
        "weights": rng.standard_normal((*tokens, CHOSEN), np.float32),
        "ids": rng.integers(-1, X, (*tokens, CHOSEN)).astype(np.int32),
    }
    if tokens == (70,):
        given["ids"][:60, 0] = 3
    weights, expert = draw_experts(rng, kind, X, E, inner)
    return given | weights | {"sum": rng.standard_normal((*tokens, E), np.float32)}, expert


@pytest.mark.parametrize(("kind", "E", "inner"), MIXTURES)
@pytest.mark.parametrize("tokens", [(1, 1), (2, 4), (70,)])
def test_mixtures(
    kind: str, E: int, inner: int, tokens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token's sum is in the order of its ids; of an id that is nobody's nothing is added."""
    given, expert = mixture(kind, E, inner, tokens)
    [got] = same_everywhere(monkeypatch, "Experts", given, FLOAT)
    [without] = run("Experts", given | {"sum": None}, FLOAT, 1)
    np.testing.assert_array_equal(got, without + given["sum"])
    x, ids, weights = (
        given[name].reshape(-1, given[name].shape[-1]) for name in ("x", "ids", "weights")
    )
    for row in range(0, len(x), 1 + len(x) // 10):
        one, wanted = slice(row, row + 1), np.zeros((1, E), F)
        for e, weight in zip(ids[row], weights[row], strict=True):
            wanted = wanted if e < 0 else wanted + expert(e, x[one]) * weight
        np.testing.assert_array_equal(without.reshape(-1, E)[one], wanted)
        alone = given | {"x": x[one], "ids": ids[one], "weights": weights[one], "sum": None}
        np.testing.assert_array_equal(run("Experts", alone, FLOAT, 1)[0], wanted)


@pytest.mark.parametrize("kind", [*KINDS, *OFFSET_KINDS])
def test_mixtures_by_definition(kind: str) -> None:
    """The op's reference agrees as far as rounding goes."""
    given, _ = mixture(kind, 96, 64, (2, 4))
    [got] = run("Experts", given | {"sum": None}, FLOAT, 1)
    plain = experts_packed(*tensors(given)[:-1]).numpy()
    close = 2e-5 if kind == FLOATS else 0.03  # the kernels round rows to int8
    assert np.abs(got - plain).max() < close * np.abs(plain).max()


WRONG: dict[str, list[tuple[int, ...]]] = {
    "x": [(2, 3, 96), (70, 95), (70, 1), (2, 70, 96)],
    "weights": [(2, 4, 2), (70,), (70, 2)],
    "ids": [(69, 3), (70,)],
    "sum": [(2, 4, 95)],
    "both": [(5, 3, 96, 32), (5, 4, 95, 32), (4, 4, 96, 32), (5, 4, 96, 31), (20, 96, 32)],
    "down": [(5, 2, 64, 32), (5, 3, 0, 32), (5, 3, 65, 32), (5, 3, 64, 16), (15, 64, 32)],
}


@pytest.mark.parametrize("kind", [FLOATS, "int4"])
def test_damaged_mixtures(kind: str) -> None:
    given, _ = mixture(kind, 96, 64, (70,))
    for name, shapes in WRONG.items():
        for shape in shapes:
            damaged = given | {name: np.zeros(shape, given[name].dtype)}
            check_refused("", "Experts", damaged, FLOAT)
    for expert in (-2, X, (1 << 31) - 1, -(1 << 31)):
        ids = np.full((70, CHOSEN), expert, np.int32)
        check_refused("no expert", "Experts", given | {"ids": ids}, FLOAT)


def embedding() -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    return {
        "tokens": np.array([[0, 6, 3], [3, 3, 1]]),
        "values": rng.integers(0, 256, (7, 2, 32)).astype(np.uint8),
        "scales": np.array([0.01, -2.0, 6e-8, 65504.0] * 4, np.float16)[:14].reshape(7, 2),
    }


@pytest.mark.parametrize("width", [32, 16])
def test_embedding(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = embedding()
    given: Operands = drawn | {"values": np.ascontiguousarray(drawn["values"][..., :width])}
    [got] = same_everywhere(monkeypatch, "Embedding", given, FLOAT)
    np.testing.assert_array_equal(got, embedding_nbits(*tensors(given)).numpy())


@pytest.mark.parametrize("kind", [*KINDS, *OFFSET_KINDS])
def test_rows_of_a_packed_weight(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what the reference unpacks; also of a last panel that isn't full."""
    given = {name: operands(kind, (1,))[name] for name in ("values", "scales")}
    tokens = np.array([[0, 31, 32, N - 1], [5, 47, 64, 98]])
    [got] = same_everywhere(monkeypatch, "Embedding", {"tokens": tokens} | given, FLOAT, N=N)
    wanted = embedding_nbits(torch.from_numpy(tokens), *tensors(given), packed=N).numpy()
    np.testing.assert_array_equal(got, wanted)
    check_refused("no token 100", "Embedding", {"tokens": tokens + 100} | given, FLOAT, N=N)


def test_rows_of_another_packed_weight() -> None:
    given = {name: operands("int4", (1,))[name] for name in ("values", "scales")}
    given["values"] = np.concatenate([given["values"], given["values"][:1]])  # the last is int8
    tokens = {"tokens": np.array([0])}
    check_refused("rows of a weight in two formats", "Embedding", tokens | given, FLOAT, N=N)


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


def test_a_float_embedding() -> None:
    table = np.random.default_rng(0).standard_normal((7, 5), np.float32)
    given: dict[str, Any] = {"tokens": np.array([[0, 6, 3], [3, 3, 1]]), "table": table}
    [got] = run("Embedding", given, FLOAT, 1)
    np.testing.assert_array_equal(got, table[given["tokens"]])
    for wrong in (7, -1):
        damaged = given | {"tokens": np.array([wrong])}
        check_refused(f"no token {wrong} of 7", "Embedding", damaged, FLOAT)


DAMAGED: dict[str, dict[str, list[tuple[int, ...]]]] = {
    "int4": {
        "x": [(3, 96), (3, 32), (0,), (3, 64, 32)],
        "values": [
            *((7, 2, 512), (2, 2, 512), (3, 2, 500), (3, 2, 128), (3, 3, 512), (6, 512)),
            (3, 0, 512),
        ],
        "scales": [
            *((3, 2, 31), (2, 2, 32), (3, 32), (3, 1, 32)),
            *((3, 2, wide) for wide in (33, 40, 49, 63)),
        ],
    },
    FP4: {"values": [(3, 2, 1024), (4, 2, 512)], "scales": [(3, 2, 15), (3, 2, 8), (3, 1, 16)]},
    FLOATS: {"values": [(3, 63, 32), (3, 64, 31), (2, 64, 32), (1, 3, 64, 32), (3, 0, 32)]},
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_products(kind: str) -> None:
    given, _ = product_operands(kind, 3, 70, 64)
    for name, shapes in DAMAGED[kind].items():
        for shape in shapes:
            damaged = given | {name: np.zeros(shape, given[name].dtype)}
            check_refused("", "Product", damaged, FLOAT, N=70)
    wrong = [-1, 64, 97, 1 << 40, -(1 << 63), (1 << 63) - 1]
    for outputs in wrong if kind == FLOATS else [0, *wrong]:
        check_refused("", "Product", given, FLOAT, N=outputs)


def test_damaged_float_weights() -> None:
    x = np.zeros((2, 32), F)
    for shape in [(31, 8), (32,), (1, 32, 8), (2, 2, 32, 8)]:
        check_refused("", "Product", {"x": x, "w": np.zeros(shape, F)}, FLOAT)


@pytest.mark.parametrize("op", ["Product", "GatedProduct"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_weight_without_inputs(op: str, bits: int) -> None:
    given: dict[str, NDArray[Any]] = {
        "x": np.zeros((1, 0), F),
        "v": np.zeros((2, 0, 128 * bits), np.uint8),
        "s": np.zeros((2, 0, 32), np.float16),
    }
    check_refused("64 outputs in 2 panels of 32, 0 blocks", op, given, FLOAT, N=64)
