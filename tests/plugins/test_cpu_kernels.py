"""The CPU's kernels, through onnxruntime: their arithmetic to the bit, and what they refuse."""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mtpbuild.plugins.cpu.layout import (
    pack_floats,
    pack_scales,
    pack_values,
    unpack_floats,
    unpack_scales,
    unpack_values,
)
from mtpbuild.plugins.product_packed.op import product_packed
from mtpbuild.runtime.cpu_library import ISAS, LAYOUT
from tests.support import cpu_kernels, exact
from tests.support.cpu_kernels import (
    HOST,
    SANITIZED,
    SOURCE,
    attended,
    compiled,
    load_backend,
    random_weight,
)
from tests.support.isas import isas

Arrays = Mapping[str, NDArray[Any]]
F = np.float32


def run(op: str, given: Arrays, threads: int = 1, **attributes: Any) -> NDArray[np.float32]:
    [y] = cpu_kernels.run(op, given, (np.float32,), threads, **attributes)
    return y


def same_everywhere(
    monkeypatch: pytest.MonkeyPatch, op: str, given: Arrays, **attributes: Any
) -> NDArray[np.float32]:
    """Run on every instruction set and with one thread and two; all must agree to the bit."""
    results = []
    for isa in isas():
        monkeypatch.setenv("MTPBUILD_CPU_ISA", isa)
        results += [run(op, given, threads, **attributes) for threads in (1, 2)]
    monkeypatch.delenv("MTPBUILD_CPU_ISA")
    results.append(run(op, given, **attributes))
    for result in results[1:]:
        np.testing.assert_array_equal(result.view(np.int32), results[0].view(np.int32))
    return results[0]


def product_operands(bits: int, M: int, N: int, K: int) -> tuple[Arrays, NDArray[np.float32]]:
    rng = np.random.default_rng(M + N + K)
    values, scales, integers = random_weight(rng, (N, K), bits)
    x = rng.standard_normal((M, K), dtype=np.float32)
    x[0, :32] = 0.0  # a block without a largest input
    x[-1, -32:] *= 1e-35  # and one that is too small to be scaled
    given = {"x": x, "values": pack_values(values).numpy()}
    given["scales"] = pack_scales(scales).numpy()
    return given, exact.product(x, integers, scales.numpy())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("M", "N", "K"), [(1, 32, 32), (2, 33, 64), (3, 100, 96), (7, 64, 192), (13, 577, 320)]
)
def test_products(bits: int, M: int, N: int, K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given, wanted = product_operands(bits, M, N, K)
    got = same_everywhere(monkeypatch, "Product", given, N=N)
    np.testing.assert_array_equal(got.view(np.int32), wanted.view(np.int32))


@pytest.mark.parametrize("bits", [4, 8])
def test_extreme_integers(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of the largest numbers are where 16 bits would not do."""
    N, K = 64, 128
    integers = np.where(np.arange(N * K).reshape(N, K // 32, 32) % 3, 0, (1 << bits) - 1)
    integers[N // 2 :] = (1 << bits) - 1
    stored: NDArray[Any] = integers.astype(np.uint8)
    if bits == 4:
        stored = stored[..., 0::2] | stored[..., 1::2] << 4
    x = np.where(np.arange(4 * K).reshape(4, K) % 2, np.float32(3), np.float32(-3))
    x[2:] = [[3.0], [-3.0]]  # the sums of a whole block are the largest ones, too
    scales = np.full((N, K // 32), 0.5, np.float16)
    given = {"x": x, "values": pack_values(torch.from_numpy(stored)).numpy()}
    given["scales"] = pack_scales(torch.from_numpy(scales)).numpy()
    got = same_everywhere(monkeypatch, "Product", given, N=N)
    wanted = exact.product(x, (integers - (1 << bits - 1)).astype(np.int32), scales)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(("fours", "eights"), [(32, 32), (64, 33), (96, 300)])
def test_products_of_both_widths(fours: int, eights: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last panels of an int4 weight may be int8, each in the place of two."""
    rng, K = np.random.default_rng(fours), 96
    x = rng.standard_normal((5, K), dtype=np.float32)
    panels, factors, wanted = [], [], []
    for bits, outputs in ((4, fours), (8, eights)):
        values, scales, integers = random_weight(rng, (outputs, K), bits)
        panels.append(pack_values(values).reshape(-1, K // 32, 512))
        factors.append(pack_scales(scales))
        wanted.append(exact.product(x, integers, scales.numpy()))
    both = torch.cat(panels), torch.cat(factors)
    given = {"x": x, "values": both[0].numpy(), "scales": both[1].numpy()}
    got = same_everywhere(monkeypatch, "Product", given, N=fours + eights)
    np.testing.assert_array_equal(got, np.concatenate(wanted, axis=1))
    plain = product_packed(torch.from_numpy(x), *both, fours + eights).numpy()
    np.testing.assert_allclose(got, plain, rtol=0.1, atol=0.5)
    with pytest.raises(Exception, match="mtpbuild Product: "):
        run("Product", given, N=fours + eights + 32)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_alone(bits: int) -> None:
    """A row's result is its own, however many rows are beside it."""
    given, wanted = product_operands(bits, 25, 200, 256)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 12, 25):
        some = dict(given, x=given["x"][25 - rows :].reshape(1, rows, -1))
        got = run("Product", some, threads=2, N=200)
        np.testing.assert_array_equal(got[0], wanted[25 - rows :])


@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows(bits: int) -> None:
    """A prompt's rows go in several pieces."""
    given, wanted = product_operands(bits, 600, 96, 1024)
    np.testing.assert_array_equal(run("Product", given, threads=2, N=96), wanted)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("M", "inner", "K"), [(1, 32, 64), (7, 96, 192), (100, 64, 96)])
def test_gated_products(
    bits: int, M: int, inner: int, K: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, both = product_operands(bits, M, 2 * inner, K)
    got = same_everywhere(monkeypatch, "GatedProduct", given, N=2 * inner)
    np.testing.assert_array_equal(got, exact.gated(both[:, :inner], both[:, inner:]))
    with pytest.raises(Exception, match="mtpbuild GatedProduct: "):
        run("GatedProduct", given, N=2 * inner - 1)


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
    rng = np.random.default_rng(len(x))
    given = {"x": rng.standard_normal(x, np.float32), "w": rng.standard_normal(w, np.float32)}
    got = same_everywhere(monkeypatch, "Product", given)
    np.testing.assert_array_equal(got, exact.float_product(given["x"], given["w"]))
    last = {"x": given["x"][..., -1:, :], "w": given["w"]}
    np.testing.assert_array_equal(run("Product", last), got[..., -1:, :])


@pytest.mark.parametrize("size", [16, 192, 100, 7])
def test_norm(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(size)
    given = {"x": rng.standard_normal((5, size), np.float32)}
    given["w"] = rng.standard_normal(size, np.float32)
    got = same_everywhere(monkeypatch, "Norm", given, epsilon=1e-6)
    np.testing.assert_array_equal(got, exact.norm(given["x"], given["w"], 1e-6))
    wanted = torch.nn.functional.rms_norm(
        torch.from_numpy(given["x"]), (size,), torch.from_numpy(given["w"]), 1e-6
    )
    np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-5, atol=1e-6)


LATENT = {"groups": 1, "values": 0, "latent": 8, "written": 0}


def attention_operands(
    rng: np.random.Generator, B: int, H: int, T: int, C: int, S: int, fresh: int
) -> dict[str, NDArray[Any]]:
    return {
        "q": rng.standard_normal((B, H, T, C), np.float32),
        "cache": rng.standard_normal((B, 1, S, C), np.float32),
        "fresh": rng.standard_normal((B, 1, fresh, C), np.float32),
        "base": rng.integers(0, S - fresh, B),
        "first": np.zeros(B, np.int64),
    }


@pytest.mark.parametrize(
    ("B", "H", "T", "C", "latent", "S"),
    [
        (1, 8, 4, 80, 64, 200),
        (2, 3, 2, 20, 13, 100),
        (1, 16, 1, 24, 16, 1300),
        (1, 4, 9, 12, 8, 70),
    ],
)
def test_attention(
    B: int, H: int, T: int, C: int, latent: int, S: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh rows beside the cache or in it, tokens together or each alone."""
    given = attention_operands(np.random.default_rng(S), B, H, T, C, S, T)
    given["base"][0] = S - T
    attributes: dict[str, Any] = {"scale": 0.3, **LATENT, "latent": latent}
    got = same_everywhere(monkeypatch, "Attention", given, **attributes)
    np.testing.assert_array_equal(got, attended(given, 0.3, latent))

    written = {name: array.copy() for name, array in given.items()}
    for b, base in enumerate(given["base"]):
        written["cache"][b, 0, base : base + T] = given["fresh"][b, 0]
    in_cache = run("Attention", written, **attributes | {"written": 1})
    np.testing.assert_array_equal(in_cache, got)

    for t in range(T):
        alone = dict(written, q=given["q"][:, :, t : t + 1].copy(), base=given["base"] + t)
        one = run("Attention", alone, threads=2, **attributes | {"written": 1})
        np.testing.assert_array_equal(one, got[:, :, t : t + 1])


def test_attention_by_definition() -> None:
    given = attention_operands(np.random.default_rng(1), 1, 8, 3, 80, 700, 3)
    got = run("Attention", given, scale=0.1, **LATENT | {"latent": 64})
    from mtpbuild.plugins import mla_attention

    operands = [torch.from_numpy(given[name]) for name in ("q", "cache", "fresh", "base", "first")]
    wanted = mla_attention(*operands, 0.1, 64)
    np.testing.assert_allclose(got, wanted.numpy(), atol=2e-6)


@pytest.mark.parametrize(
    ("H", "G", "T", "S"), [(8, 2, 3, 90), (6, 6, 1, 40), (32, 4, 2, 600), (8, 4, 1, 2700)]
)
def test_grouped_attention(H: int, G: int, T: int, S: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group's heads attend to its own keys and values."""
    D, rng = 12, np.random.default_rng(S)
    given = attention_operands(rng, 2, H, T, 2 * G * D, S, T)
    given["q"] = given["q"][..., :D].copy()
    given["base"][0] = S - T
    sizes = {"groups": G, "values": G * D, "latent": D, "written": 0}
    got = same_everywhere(monkeypatch, "Attention", given, scale=0.4, **sizes)
    per_group = H // G
    for g in range(G):  # as latent attention over the group's values, then its keys
        heads = slice(g * per_group, (g + 1) * per_group)
        own = [*range((G + g) * D, (G + g + 1) * D), *range(g * D, (g + 1) * D)]
        rows = {name: given[name][..., own].copy() for name in ("cache", "fresh")}
        queries = np.concatenate([np.zeros_like(given["q"]), given["q"]], axis=-1)[:, heads]
        wanted = attended(dict(given, q=queries, **rows), 0.4, D)
        np.testing.assert_array_equal(got[:, heads], wanted)
    from mtpbuild.plugins import grouped_attention

    operands = [torch.from_numpy(given[name]) for name in ("q", "cache", "fresh", "base", "first")]
    by_definition = grouped_attention(*operands, 0.4, G).numpy()
    np.testing.assert_allclose(got, by_definition, atol=2e-6)


def test_an_idle_slot_reads_nothing_outside() -> None:
    """Its base may be anything."""
    given = attention_operands(np.random.default_rng(2), 3, 2, 2, 16, 40, 2)
    given["base"][:] = 20, 1 << 40, -5
    given["first"][:] = 0, 1 << 40, -(1 << 40)
    for written in (0, 1):
        got = run("Attention", given, scale=1.0, **LATENT | {"written": written})
        assert np.isfinite(got).all()


@pytest.mark.parametrize("name", ["Cos", "Sin"])
def test_circle(name: str) -> None:
    """Right to the last digit but one, wherever an angle stands."""
    positions = np.arange(0, 5000, 7, dtype=np.float32)[:, None]
    x = positions * np.array([1, 0.3, 1e-3, 1e-5, 200], np.float32)
    x[0] = 0, -1.5, np.pi / 4, -np.pi / 2, np.pi
    got = run(name, {"x": x})
    wanted = (np.cos if name == "Cos" else np.sin)(x.astype(np.float64))
    np.testing.assert_allclose(got, wanted, rtol=1.3e-7, atol=1e-9)
    for i in (0, 5, 60):
        np.testing.assert_array_equal(run(name, {"x": x[i : i + 1, :3]}), got[i : i + 1, :3])


def panels_of(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(pack_floats(torch.from_numpy(weight)).numpy())


def assert_same_bits(got: NDArray[Any], wanted: NDArray[Any]) -> None:
    np.testing.assert_array_equal(got.view(np.int32), wanted.view(np.int32))


@pytest.mark.parametrize(
    ("M", "K", "N"),
    [(1, 5, 1), (1, 40, 300), (2, 33, 64), (3, 96, 31), (5, 7, 100), (7, 64, 577), (60, 300, 129)],
)
def test_packed_floats(M: int, K: int, N: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed or not, and whatever rows are beside it, a row's result is the definition's."""
    rng = np.random.default_rng(K)
    x, w = rng.standard_normal((M, K), np.float32), rng.standard_normal((K, N), np.float32)
    given, wanted = {"x": x, "w": panels_of(w)}, exact.float_product(x, w)
    assert_same_bits(same_everywhere(monkeypatch, "Product", given, N=N), wanted)
    assert_same_bits(run("Product", {"x": x, "w": w}), wanted)
    for first, end in ((0, 1), (M - 1, M), (M // 2, M)):
        some = dict(given, x=x[None, first:end])
        assert_same_bits(run("Product", some, threads=2, N=N)[0], wanted[first:end])


def test_packed_floats_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 3, 4, 20), np.float32)
    w = rng.standard_normal((3, 20, 70), np.float32)
    got = same_everywhere(monkeypatch, "Product", {"x": x, "w": panels_of(w)}, N=70)
    assert_same_bits(got, exact.float_product(x, w))


@pytest.mark.parametrize(("M", "K", "inner"), [(1, 20, 32), (7, 64, 288), (100, 31, 96)])
def test_gated_floats(M: int, K: int, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(M)
    x, w = rng.standard_normal((M, K), np.float32), rng.standard_normal((K, 2 * inner), np.float32)
    given, both = {"x": x, "w": panels_of(w)}, exact.float_product(x, w)
    got = same_everywhere(monkeypatch, "GatedProduct", given, N=2 * inner)
    assert_same_bits(got, exact.gated(both[:, :inner], both[:, inner:]))
    for outputs in (2 * inner - 1, 2 * inner - 64, 0, 1 << 62):
        with pytest.raises(Exception, match="mtpbuild GatedProduct: "):
            run("GatedProduct", given, N=outputs)


def test_sums_of_nothing() -> None:
    """No inputs, or no rows: what a product of them is, and no byte is read."""
    x, w = np.zeros((3, 0), np.float32), np.zeros((2, 0, 32), np.float32)
    assert_same_bits(run("Product", {"x": x, "w": w}, N=40), np.zeros((3, 40), np.float32))
    none = {"x": np.zeros((0, 8), np.float32), "w": np.zeros((2, 8, 32), np.float32)}
    assert run("Product", none, N=40).shape == (0, 40)


@pytest.mark.parametrize("shape", [(7, 70), (3, 7, 64), (2, 5, 33)])
def test_packing_floats_is_undone(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    assert torch.equal(unpack_floats(pack_floats(weight), shape[-1]), weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_is_undone(bits: int) -> None:
    values, scales, _ = random_weight(np.random.default_rng(0), (3, 70, 96), bits)
    packed, factors = pack_values(values), pack_scales(scales)
    assert packed.shape == (3, 3, 3, 128 * bits)
    assert factors.shape == (3, 3, 3, 32)
    assert torch.equal(unpack_values(packed, 70), values)
    assert torch.equal(unpack_scales(factors, 70), scales)


def test_layout_in_8_bits() -> None:
    """Output 41, the tenth of panel 1, has input 4 * 5 + 3 of a block in line 2 * 5 + 0."""
    values, _, _ = random_weight(np.random.default_rng(0), (3, 70, 96), 8)
    assert pack_values(values)[2, 1, 2, 64 * 10 + 4 * 9 + 3] == values[2, 41, 2, 23]


def test_layout_in_4_bits() -> None:
    """Output 51, the 20th of panel 1, has inputs 8 * 3 + 1 and 8 * 3 + 5 of a block in one byte."""
    values, _, _ = random_weight(np.random.default_rng(0), (3, 70, 96), 4)
    byte = pack_values(values)[2, 1, 2, 64 * 7 + 4 * 3 + 1]
    assert byte & 0xF == values[2, 51, 2, 12] >> 4
    assert byte >> 4 == values[2, 51, 2, 14] >> 4


def test_many_scales_of_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subnormal and negative scales are what fp16 says."""
    bits = np.array([0x0001, 0x03FF, 0x8001, 0x0400, 0x7BFF, 0xFBFF, 0x8000, 0x3C00], np.uint16)
    scales = np.tile(bits, 4).view(np.float16).reshape(32, 1)
    values, _, integers = random_weight(np.random.default_rng(3), (32, 32), 8)
    x = np.random.default_rng(4).standard_normal((1, 32), np.float32)
    given = {"x": x, "values": pack_values(values).numpy()}
    given["scales"] = pack_scales(torch.from_numpy(scales)).numpy()
    got = same_everywhere(monkeypatch, "Product", given, N=32)
    np.testing.assert_array_equal(got, exact.product(x, integers, scales))


LARGEST = (1 << 63) - 1
CALLS: dict[str, tuple[str, Arrays, dict[str, Any]]] = {
    "integers": ("Product", product_operands(4, 3, 70, 64)[0], {"N": 70}),
    "panels": ("Product", {"x": np.zeros((3, 8), F), "w": np.zeros((3, 8, 32), F)}, {"N": 70}),
    "floats": ("Product", {"x": np.zeros((2, 32), F), "w": np.zeros((32, 8), F)}, {}),
    "norm": ("Norm", {"x": np.zeros((2, 32), F), "w": np.zeros(32, F)}, {"epsilon": 1e-6}),
    "attention": (
        "Attention",
        attention_operands(np.random.default_rng(0), 2, 2, 1, 16, 40, 1),
        {"scale": 1.0, **LATENT},
    ),
}
SHAPES: dict[str, dict[str, list[tuple[int, ...]]]] = {
    "integers": {
        "x": [(3, 96), (3, 32), (0,), (3, 64, 32)],
        "values": [
            (7, 2, 512),
            (2, 2, 512),
            (3, 2, 500),
            (3, 2, 128),
            (3, 3, 512),
            (6, 512),
            (3, 0, 512),
        ],
        "scales": [(3, 2, 31), (2, 2, 32), (3, 32), (3, 1, 32)],
    },
    "panels": {"w": [(3, 7, 32), (3, 8, 31), (2, 8, 32), (1, 3, 8, 32), (3, 0, 32)]},
    "floats": {"w": [(31, 8), (32,), (1, 32, 8), (2, 2, 32, 8)]},
    "norm": {"w": [(31,)]},
    "attention": {
        **{"q": [(2, 2, 1, 17)], "cache": [(2, 2, 40, 16)], "fresh": [(1, 1, 1, 16)]},
        **{"base": [(1,)], "first": [(2, 1)]},
    },
}
NUMBERS: dict[str, dict[str, list[int]]] = {
    "integers": {"N": [0, -1, 64, 97, 1 << 40, -(1 << 63)]},
    "panels": {"N": [-1, 64, 97, 1 << 40, -(1 << 63), LARGEST]},
    "attention": {"latent": [0, 17, -1, 1 << 62], "groups": [0, 2, -1], "values": [-1, 9, 1 << 62]},
}


@pytest.mark.parametrize("call", CALLS)
def test_damaged_operands(call: str) -> None:
    op, given, how = CALLS[call]
    wrong: list[tuple[Any, dict[str, Any]]] = [
        (dict(given) | {name: np.zeros(shape, given[name].dtype)}, how)
        for name, shapes in SHAPES[call].items()
        for shape in shapes
    ]
    numbers = NUMBERS.get(call, {})
    wrong += [(given, how | {name: n}) for name, values in numbers.items() for n in values]
    for operands, attributes in wrong:
        with pytest.raises(Exception, match=f"mtpbuild {op}: "):
            run(op, operands, **attributes)


def test_a_missing_attribute() -> None:
    given, _ = product_operands(4, 1, 32, 32)
    with pytest.raises(Exception, match="attribute N is missing"):
        run("GatedProduct", given)


def test_an_unknown_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTPBUILD_CPU_ISA", "mmx")
    given, _ = product_operands(4, 1, 32, 32)
    with pytest.raises(Exception, match="MTPBUILD_CPU_ISA is mmx; this machine has plain"):
        run("Product", given, N=32)


def test_no_rows() -> None:
    given, _ = product_operands(8, 1, 64, 32)
    none = dict(given, x=np.zeros((0, 32), np.float32))
    assert run("Product", none, N=64).shape == (0, 64)


def test_sources_are_formatted() -> None:
    tool = Path(sys.executable).with_name("clang-format")
    if not tool.exists():
        pytest.skip("clang-format is not installed")
    files = [*SOURCE.glob("*.h"), *SOURCE.glob("*.cpp"), HOST]
    style = f"--style=file:{SOURCE / '.clang-format'}"
    command = [str(tool), style, "--dry-run", "-Werror", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]


def test_engines_name_the_operators_that_they_need() -> None:
    """LAYOUT counts up with the operators, so that an older library refuses an engine in a line."""
    attribute = r"from\.\w+(?:<\w+>)?\(\"\w+\""
    operator = r"static constexpr (?:const char\*|Operand) .*?;"
    declared = re.compile(f"{operator}|{attribute}", re.DOTALL)
    files = sorted(SOURCE.glob("*_ops.*"))
    found = [" ".join(x.split()) for file in files for x in declared.findall(file.read_text())]
    digest = hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]
    assert (LAYOUT, len(found), digest) == ("panels32.8", 106, "3c7f9fcf85e9e584")


def test_instruction_sets_share_no_function() -> None:
    """The linker keeps one copy of a library's inline function, maybe one for AVX-512."""
    intrinsics = ("immintrin.h", "arm_neon.h")
    for isa in ISAS:
        files, seen = [f"{isa}.cpp"], set[str]()
        while files:
            text = (SOURCE / files.pop()).read_text()
            seen |= set(re.findall(r"#include <(.*)>", text))
            files += re.findall(r'#include "(.*)"', text)
        assert seen <= {"cmath", "cstddef", "cstdint", "cstring", *intrinsics}


@pytest.mark.full
@pytest.mark.skipif(SANITIZED is not None, reason="it is about the sources")
@pytest.mark.parametrize("name", load_backend().list_files(SOURCE, "x86_64"))
def test_warnings_are_errors(name: str, tmp_path: Path) -> None:
    backend = load_backend()
    source, to = str(SOURCE / name), str(tmp_path / "o")
    command = [
        "g++",
        *backend.COMMON,
        *backend.list_files(SOURCE, "x86_64")[name],
        "-Werror",
        "-c",
        source,
        "-o",
        to,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]


@pytest.mark.full
@pytest.mark.skipif(SANITIZED is not None, reason="it is this test that runs the others")
def test_sanitizers(tmp_path: Path) -> None:
    """All of these tests, with every access and every operation of integers looked at."""
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]
    library = compiled(SOURCE, tmp_path / "sanitized.so", *flags, level="-O1")
    runtimes = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True)
        for name in ("libasan.so", "libubsan.so")
    ]
    preload = " ".join(each.stdout.strip() for each in runtimes)
    environment = os.environ | {"LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0"}
    tests = sorted(map(str, Path(__file__).parent.glob("test_cpu_*.py")))
    command = [sys.executable, "-m", "pytest", "-xsq", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command,
        env=environment | {"SANITIZED_CPU_LIBRARY": str(library)},
        capture_output=True,
        text=True,
        cwd=SOURCE.parents[2],
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
