"""Integers with zeros or minima of their own: products to the bit, on every instruction set."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtpbuild.plugins import experts_packed, product_packed
from mtpbuild.plugins.cpu.layout import (
    dequantise,
    pack_scales,
    pack_values,
    reorder_gates,
    split_offsets,
    unpack_scales,
    with_offsets,
)
from tests.support import exact
from tests.support.cpu_kernels import check_refused, random_weight, run, same_everywhere

FLOAT = (np.float32,)
Weight = tuple[Tensor, Tensor, NDArray[np.int32], NDArray[np.float16]]


def moved(rng: np.random.Generator, shape: tuple[int, ...], bits: int) -> Weight:
    """Values and scales with zeros of a weight [.., N, K], what they stand for, and the scales."""
    values, scales, integers = random_weight(rng, shape, bits)
    half = 1 << bits - 1
    zeros = rng.integers(-half, half, scales.shape).astype(np.int8)
    zeros.flat[:2] = -half, half - 1
    both = with_offsets(scales, torch.from_numpy(zeros))
    return values, both, integers - zeros[..., None].astype(np.int32), scales.numpy()


def operands(bits: int, M: int, N: int, K: int) -> tuple[dict[str, Any], NDArray[np.float32]]:
    rng = np.random.default_rng(M + N + K)
    values, scales, integers, factors = moved(rng, (N, K), bits)
    x = rng.standard_normal((M, K), dtype=np.float32)
    x[0, :32] = 0.0
    given = {"x": x, "values": pack_values(values).numpy()}
    given["scales"] = pack_scales(scales).numpy()
    return given, exact.product(x, integers, factors)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("M", "N", "K"), [(1, 32, 32), (2, 33, 64), (3, 100, 96), (7, 64, 192), (25, 577, 320)]
)
def test_products(bits: int, M: int, N: int, K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given, wanted = operands(bits, M, N, K)
    [got] = same_everywhere(monkeypatch, "Product", given, FLOAT, N=N)
    np.testing.assert_array_equal(got.view(np.int32), wanted.view(np.int32))
    [last] = run("Product", given | {"x": given["x"][-1:]}, FLOAT, 1, N=N)
    np.testing.assert_array_equal(last, got[-1:])
    plain = product_packed(*map(torch.from_numpy, given.values()), N).numpy()
    assert np.abs(got - plain).max() < 0.02 * np.abs(plain).max() + 1e-6
    for wide in (33, 40, 49, 63):
        shape = (*given["scales"].shape[:2], wide)
        check_refused("", "Product", given | {"scales": np.zeros(shape, np.float16)}, FLOAT, N=N)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_numbers(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's sum less its zero is exact in fp32 at the ends of both ranges."""
    N, K, half = 64, 64, 1 << bits - 1
    codes = np.where(np.arange(N * K).reshape(N, 2, 32) % 5, 2 * half - 1, 0).astype(np.uint8)
    stored: NDArray[Any] = codes[..., 0::2] | codes[..., 1::2] << 4 if bits == 4 else codes
    zeros = np.where(np.arange(N * 2).reshape(N, 2) % 2, -half, half - 1).astype(np.int8)
    scales = np.full((N, 2), 0.5, np.float16)
    x = np.where(np.arange(4 * K).reshape(4, K) % 31, np.float32(3), np.float32(-3))
    both = with_offsets(torch.from_numpy(scales), torch.from_numpy(zeros))
    given = {"x": x, "values": pack_values(torch.from_numpy(stored)).numpy()}
    given["scales"] = pack_scales(both).numpy()
    [got] = same_everywhere(monkeypatch, "Product", given, FLOAT, N=N)
    integers = codes.astype(np.int32) - half - zeros[..., None]
    np.testing.assert_array_equal(got, exact.product(x, integers, scales))


@pytest.mark.parametrize("bits", [4, 8])
def test_gates(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given, both = operands(bits, 7, 192, 96)
    [got] = same_everywhere(monkeypatch, "GatedProduct", given, FLOAT, N=192)
    np.testing.assert_array_equal(got, exact.gated(both[:, :96], both[:, 96:]))


def test_both_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, K = np.random.default_rng(0), 96
    x = rng.standard_normal((5, K), dtype=np.float32)
    panels, factors, wanted = [], [], []
    for bits, outputs in ((4, 64), (8, 33)):
        values, scales, integers, halves = moved(rng, (outputs, K), bits)
        panels.append(pack_values(values).reshape(-1, K // 32, 512))
        factors.append(pack_scales(scales))
        wanted.append(exact.product(x, integers, halves))
    given = {"x": x, "values": torch.cat(panels).numpy(), "scales": torch.cat(factors).numpy()}
    [got] = same_everywhere(monkeypatch, "Product", given, FLOAT, N=97)
    np.testing.assert_array_equal(got, np.concatenate(wanted, axis=1))
    plain = product_packed(*map(torch.from_numpy, given.values()), 97).numpy()
    assert np.abs(got - plain).max() < 0.02 * np.abs(plain).max()


@pytest.mark.parametrize("bits", [4, 8])
def test_experts(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    X, E, inner = 4, 96, 64
    rng = np.random.default_rng(bits)
    values, scales, ups, up_scales = moved(rng, (X, 2 * inner, E), bits)
    down_values, down_both, downs, down_scales = moved(rng, (X, E, inner), bits)
    x = rng.standard_normal((9, E), np.float32)
    ids = rng.integers(0, X, (9, 1)).astype(np.int32)
    given = {"x": x, "weights": np.ones((9, 1), np.float32), "ids": ids}
    given["both"] = pack_values(reorder_gates(values)).numpy()
    given["both_scales"] = pack_scales(reorder_gates(scales)).numpy()
    given["down"] = pack_values(down_values).numpy()
    given["down_scales"] = pack_scales(down_both).numpy()
    [got] = same_everywhere(monkeypatch, "Experts", given, FLOAT)
    for row, (e,) in enumerate(ids):
        h = exact.product(x[row : row + 1], ups[e], up_scales[e])
        wanted = exact.product(exact.gated(h[:, ::2], h[:, 1::2]), downs[e], down_scales[e])
        np.testing.assert_array_equal(got[row : row + 1], wanted)
    plain = experts_packed(*map(torch.from_numpy, given.values())).numpy()
    assert np.abs(got - plain).max() < 0.03 * np.abs(plain).max()


def shifted(rng: np.random.Generator, shape: tuple[int, ...], bits: int) -> tuple[Any, ...]:
    """Values and scales with minima of a weight [N, K], its codes, the scales and the minima."""
    values, scales, integers = random_weight(rng, shape, bits)
    minima = (0.1 * rng.standard_normal(scales.shape)).astype(np.float16)
    both = with_offsets(scales, torch.from_numpy(minima))
    return values, both, integers + (1 << bits - 1), scales.numpy(), minima


def product_with_minima(
    x: NDArray[np.float32], w: NDArray[np.int32], *by_block: NDArray[np.float16]
) -> NDArray[np.float32]:
    """x [M, K] times codes, scales and minima of a weight [N, K]."""
    values, factors = exact.quantise(x)
    scales, minima = (each.astype(np.float32) for each in by_block)
    total = np.zeros((len(x), len(w)), np.float32)
    for b in range(w.shape[1]):
        sums = (values[:, b] @ w[:, b].T).astype(np.float32)
        inputs = values[:, b].sum(-1, keepdims=True).astype(np.float32)
        total = exact.fma(sums, scales[None, :, b] * factors[:, b, None], total)
        total = exact.fma(minima[None, :, b], inputs * factors[:, b, None], total)
    return total


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 32, 32), (3, 100, 96), (25, 577, 320)])
def test_minima(bits: int, M: int, N: int, K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(M)
    values, scales, *weight = shifted(rng, (N, K), bits)
    x = rng.standard_normal((M, K), dtype=np.float32)
    given = {"x": x, "values": pack_values(values).numpy()}
    given["scales"] = pack_scales(scales).numpy()
    assert given["scales"].shape[-1] == 64
    [got] = same_everywhere(monkeypatch, "Product", given, FLOAT, N=N)
    np.testing.assert_array_equal(got, product_with_minima(x, *weight))
    plain = product_packed(*map(torch.from_numpy, given.values()), N).numpy()
    assert np.abs(got - plain).max() < 0.02 * np.abs(plain).max() + 1e-6
    [last] = run("Product", given | {"x": x[-1:]}, FLOAT, 1, N=N)
    np.testing.assert_array_equal(last, got[-1:])
    assert torch.equal(unpack_scales(pack_scales(scales), N), scales)
    codes, factors, minima = weight
    meant = codes.astype(np.float32) * factors[..., None].astype(np.float32) + minima[
        ..., None
    ].astype(np.float32)
    np.testing.assert_array_equal(dequantise(values, scales, bits), meant.reshape(N, K))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_layout(bits: int) -> None:
    values, scales, integers, factors = moved(np.random.default_rng(0), (2, 70, 64), bits)
    packed = pack_scales(scales)
    assert packed.shape == (2, 3, 2, 48)
    assert torch.equal(unpack_scales(packed, 70), scales)
    halves, zeros = split_offsets(scales)
    assert torch.equal(halves, torch.from_numpy(factors))
    assert zeros is not None
    wanted = integers * factors[..., None].astype(np.float32)
    np.testing.assert_array_equal(dequantise(values, scales, bits), wanted.reshape(2, 70, 64))
