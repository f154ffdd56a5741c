"""Attention to a window and to compressed rows, the choice of these, routers by roots, and products
by group: they equal their definitions, on every instruction set.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mtpbuild.plugins import choose_rows
from mtpbuild.plugins.compressed_attention.op import (
    choose_compressed,
    compressed_attention,
    read_compressed,
)
from mtpbuild.plugins.cpu.layout import pack_floats, pack_scales, pack_values
from mtpbuild.plugins.moe.op import root_route
from mtpbuild.plugins.product_packed.op import product_packed
from tests.support import exact
from tests.support.cpu_kernels import check_refused, run, same_everywhere

F = np.float32
ONE = (F,)
D, HALF = 24, 3
Given = dict[str, Any]
KIND = {"groups": 1, "values": 0, "latent": D, "scale": D**-0.5, "epsilon": 1e-6}
TOKENS = "q", "cos", "sin", "chosen"  # operands with a row for each token


def tensors(given: Mapping[str, Any]) -> list[torch.Tensor | None]:
    return [None if x is None else torch.from_numpy(x) for x in given.values()]


def draw(
    seed: int, tokens: int, ring: int, ratio: int, group: int, heads: int = 20, count: int = 0
) -> tuple[Given, Given]:
    """Draw operands of `CompressedAttention` for two slots, far into a ring and at its beginning.

    count: chosen rows, of which the slot at the beginning has fewer.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, F)

    base = np.array([ring + 77, 2])
    rows = -(-int(base.max() + 2 * tokens) // ratio + 1)
    given: Given = {
        "q": 3 * normal(2, tokens, heads * D), "sinks": normal(heads),
        "cos": normal(2, tokens, HALF), "sin": normal(2, tokens, HALF),
        "cache": normal(2, 1, ring, D), "base": base, "first": np.array([1, 0]),
        "fresh": normal(2, 1, tokens + 1, D), "compressed": None, "chosen": None,
    }  # fmt: skip
    if ratio > 1:
        width = -(-(D + 5) // group)
        given["compressed"] = normal(2, 1, ratio * -(-rows // 64) * 64, width)
    if count:
        chosen = np.full((2, tokens, count), -1)
        for b in range(2):
            for t in range(tokens):
                seen = (int(base[b] + given["first"][b]) + t + 1) // ratio
                own = np.sort(rng.permutation(seen)[:count])
                chosen[b, t, : len(own)] = own
        given["chosen"] = chosen
    how = {"window": 9, "ratio": ratio, "group": group, "written": 0, "heads": heads}
    return given, KIND | how


def attend(given: Given, how: Given) -> NDArray[np.float32]:
    sizes = how["window"], how["ratio"], how["group"], bool(how["written"]), how["epsilon"]
    y: NDArray[np.float32] = compressed_attention(*tensors(given), *sizes).numpy()
    return y


CASES = [  # tokens, ring, ratio, group, chosen rows, window
    (1, 64, 1, 1, 0, 9),
    (5, 128, 4, 4, 7, 64),
    (3, 640, 2, 2, 200, 400),
    (3, 192, 128, 64, 0, 100),
    (40, 192, 2, 1, 0, 128),
]


@pytest.mark.parametrize(("tokens", "ring", "ratio", "group", "count", "window"), CASES)
def test_attention_is_its_definition(
    tokens: int,
    ring: int,
    ratio: int,
    group: int,
    count: int,
    window: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that a token does not see may hold anything; a written row is read from the cache."""
    given, how = draw(tokens, tokens, ring, ratio, group, count=count)
    how["window"] = window
    wanted = attend(given, how)
    (got,) = same_everywhere(monkeypatch, "CompressedAttention", given, ONE, **how)
    np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-5)
    written, nan = given | {"cache": given["cache"].copy()}, np.full_like(given["fresh"], np.nan)
    for b in range(2):
        at = (given["base"][b] + np.arange(tokens + 1)) % ring
        written["cache"][b, 0, at] = given["fresh"][b, 0]
        unseen = (at[-1] + 1 + np.arange(ring - window - tokens - 1)) % ring
        written["cache"][b, 0, unseen] = np.nan
        if ratio > 1:
            complete = int(given["base"][b] + given["first"][b] + tokens) // ratio
            written["compressed"][b, 0, complete * ratio :] = np.nan
    (again,) = run("CompressedAttention", written | {"fresh": nan}, ONE, 2, **how | {"written": 1})
    np.testing.assert_array_equal(again, got)
    for t in (0, tokens - 1):  # a token alone, as its first or after others
        alone = {k: x[:, t : t + 1].copy() if k in TOKENS and x is not None else x
                 for k, x in written.items()}  # fmt: skip
        alone["first"] = given["first"] + t
        (one,) = run("CompressedAttention", alone, ONE, 1, **how | {"written": 1})
        np.testing.assert_array_equal(one[:, 0], got[:, t])


def test_a_block_sees_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens from the last fresh row on see what it sees, those before them too."""
    given, how = draw(6, 3, 128, 1, 1)
    given["first"][:] = given["fresh"].shape[2] - 1
    for name in ("q", "cos", "sin"):
        given[name][:, 2] = given[name][:, 0]
    (got,) = same_everywhere(monkeypatch, "CompressedAttention", given, ONE, **how)
    np.testing.assert_allclose(got, attend(given, how), rtol=2e-4, atol=2e-5)
    np.testing.assert_array_equal(got[:, 0], got[:, 2])


def test_the_arithmetic_of_attention() -> None:
    """To the bit: each 128 rows are a partial softmax, and the sink is another."""
    given, how = draw(0, 1, 192, 2, 2, heads=3)
    how |= {"window": 140, "written": 1}
    (got,) = run("CompressedAttention", given, ONE, 2, **how)
    end = int(given["base"][0]) + 2
    ones, parts = np.ones(D, F), list[Any]()
    q = exact.norm(given["q"].reshape(2, 3, D)[0], ones, 1e-6)
    cos, sin = given["cos"][0, 0], given["sin"][0, 0]

    def turn(x: Any, sin: Any) -> None:
        a, b = x[:, -2 * HALF :: 2].copy(), x[:, 1 - 2 * HALF :: 2].copy()
        x[:, -2 * HALF :: 2], x[:, 1 - 2 * HALF :: 2] = a * cos - b * sin, b * cos + a * sin

    turn(q, sin)
    rows = given["cache"][0, 0, np.arange(end - 140, end) % 192]
    entries = read_compressed(torch.from_numpy(given["compressed"]), 2, 2, 0, D)[0].numpy()
    scaled = q * F(D**-0.5)
    for begin in range((end - 140) // 128 * 128, end, 128):
        places = range(max(begin, end - 140), min(begin + 128, end))
        part = exact.attend_partly(scaled, rows[[p - end + 140 for p in places]], D, places[0])
        parts.append(part)
    for begin in range(0, end // 2, 128):
        parts.append(exact.attend_partly(scaled, entries[begin : min(begin + 128, end // 2)], D))
    sink = given["sinks"], np.ones(3, F), np.zeros((3, D), F)
    wanted = exact.fold_parts([*parts, sink])
    turn(wanted, -sin)
    np.testing.assert_array_equal(got.reshape(2, 3, D)[0], wanted)


def test_attention_to_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (0, 12):
        given, how = draw(4, 3, 128, 4, 4, count=count)
        halves = {
            name: torch.from_numpy(given[name]).bfloat16() for name in ("cache", "compressed")
        }
        wide = {name: x.float().numpy() for name, x in halves.items()}
        (wanted,) = run("CompressedAttention", given | wide, ONE, 1, **how)
        operands = given | halves
        (got,) = same_everywhere(monkeypatch, "CompressedAttention", operands, ONE, **how)
        np.testing.assert_array_equal(got, wanted)


def test_places_and_numbers_that_no_row_has() -> None:
    """Idle slots have any position; a NaN of a row or a choice reaches its own queries alone."""
    given, how = draw(1, 2, 128, 4, 4, count=8)
    (good,) = run("CompressedAttention", given, ONE, 1, **how)
    for far in (1 << 40, (1 << 63) - 1, -(1 << 63), -5, (1 << 31) - 1):
        for name in ("base", "first"):
            for written in (0, 1):
                idle = given | {name: np.array([given[name][0], far])}
                kind = how | {"written": written}
                (one,) = run("CompressedAttention", idle, ONE, 1, **kind)
                (usual,) = run("CompressedAttention", given, ONE, 1, **kind)
                np.testing.assert_array_equal(one[0], usual[0])
                choice = {"q": np.ones((2, 2, 8), F), "weights": np.ones((2, 2, 2), F)}
                choice |= {name: given[name][..., :1] for name in ("cos", "sin")}
                choice |= {"cache": given["compressed"], "base": idle["base"]}
                choice |= {"first": idle["first"]}
                sizes = {"count": 4, "ratio": 4, "group": 4, "place": D}
                run("ChooseCompressed", choice, (np.int64,), 1, **sizes)
    for name, at in (("chosen", (0, 1, 3)), ("cache", (0, 0, 76)), ("sinks", (3,))):
        wrong = given | {name: given[name].copy()}
        wrong[name][at] = -2 if name == "chosen" else np.nan
        (found,) = run("CompressedAttention", wrong, ONE, 1, **how)
        bad = np.asarray(np.isnan(found.reshape(2, 2, 20, D)).all(-1))
        assert bad.any()
        np.testing.assert_array_equal(found[~bad.repeat(D, -1).reshape(found.shape)],
                                      good[~bad.repeat(D, -1).reshape(found.shape)])  # fmt: skip
        expected = {"chosen": (0, 1), "cache": (0,), "sinks": (slice(None), slice(None), 3)}[name]
        assert bad[expected].all()
        assert bad.sum() == bad[expected].size
    odd = given | {"chosen": np.array(given["chosen"])}
    odd["chosen"][0, 0, -1], odd["chosen"][1, 1, 0] = 1 << 50, -(1 << 50)
    (found,) = run("CompressedAttention", odd, ONE, 1, **how)
    assert np.isfinite(found).all()


@pytest.mark.parametrize(
    ("changes", "how"),
    [
        ({"q": np.ones((2, 2, 20 * D - 1), F)}, {}),
        ({"sinks": np.ones(19, F)}, {}),
        ({"cos": np.ones((2, 2, 13), F), "sin": np.ones((2, 2, 13), F)}, {}),
        ({"cache": np.ones((2, 1, 128, D - 1), F)}, {}),
        ({"fresh": np.ones((2, 1, 3, D - 1), F), "cache": np.ones((2, 1, 128, D - 1), F)}, {}),
        ({"base": np.zeros(3, np.int64)}, {}),
        ({"compressed": np.ones((1, 1, 128, 8), F)}, {}),
        ({"compressed": np.ones((2, 1, 128, 5), F)}, {}),
        ({"chosen": np.zeros((2, 3, 8), np.int64)}, {}),
        ({"compressed": None}, {}),
        ({}, {"group": 5}),
        ({}, {"group": 0}),
        ({}, {"ratio": 0}),
        ({}, {"window": 0}),
        ({}, {"heads": 0}),
    ],
)
def test_attention_refuses_other_sizes(changes: Given, how: Given) -> None:
    given, usual = draw(1, 2, 128, 4, 4, count=8)
    check_refused("", "CompressedAttention", given | changes, ONE, **usual | how)


@pytest.mark.parametrize("levels", [None, 2])
@pytest.mark.parametrize(("tokens", "rows", "count"), [(1, 40, 5), (4, 700, 600), (3, 9, 20)])
def test_compressed_rows_are_chosen(
    tokens: int, rows: int, count: int, levels: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `choose_rows` chooses among the same keys; with levels, many scores tie."""
    rng, ratio, heads, size, place = np.random.default_rng(rows), 4, 4, 16, 3

    def numbers(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, F) if levels is None else rng.integers(
            levels, size=shape
        ).astype(F)  # fmt: skip

    turned = levels is None
    given: Given = {
        "q": numbers(2, tokens, heads * size), "weights": numbers(2, tokens, heads),
        "cos": rng.random((2, tokens, 2), F) if turned else np.ones((2, tokens, 2), F),
        "sin": rng.random((2, tokens, 2), F) if turned else np.zeros((2, tokens, 2), F),
        "cache": numbers(2, 1, ratio * rows, 5), "base": np.array([ratio * rows - tokens - 1, 6]),
        "first": np.array([1, 0]),
    }  # fmt: skip
    how = {"count": count, "ratio": ratio, "group": 4, "place": place}
    (got,) = same_everywhere(monkeypatch, "ChooseCompressed", given, (np.int64,), **how)
    wanted = choose_compressed(*tensors(given), *how.values())
    np.testing.assert_array_equal(got, wanted.numpy())
    if turned:
        return
    keys = read_compressed(torch.from_numpy(given["cache"]), ratio, 4, place, size)[:, None]
    for t in range(tokens):  # the last row that is seen is the fresh one there
        one = {name: x[:, t : t + 1] for name, x in given.items() if x.ndim == 3}
        last = torch.from_numpy((given["base"] + given["first"] + t + 1) // ratio - 1)
        fresh = keys[torch.arange(2), :, last][:, :, None]
        plain = choose_rows(*tensors(one), keys, fresh, last, 0 * last, count, True)
        np.testing.assert_array_equal(got[:, t], plain[:, 0].numpy())
    check_refused("", "ChooseCompressed", given, (np.int64,), **how | {"place": 5})
    check_refused("", "ChooseCompressed", given, (np.int64,), **how | {"count": 0})


@pytest.mark.parametrize("hashed", [False, True])
def test_routes_by_roots(hashed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    logits = 6 * rng.standard_normal((2, 5, 40), F)
    logits[0, 3] = 1.5  # ties go to the lowest id
    logits[0, 4, :3] = 80.0, -80.0, 0.0
    table = np.stack([rng.permutation(40)[:6] for _ in range(9)]).astype(F)
    given: Given = {"logits": logits, "bias": None if hashed else rng.random(40, F).round(1)}
    given |= {"table": table if hashed else None}
    given |= {"tokens": rng.integers(9, size=(2, 5)) if hashed else None}
    how = {"groups": 1, "kept": 1, "experts": 6, "always": 0, "normalise": 1, "roots": 1}
    results = (F, np.int32)
    got = same_everywhere(monkeypatch, "Route", given, results, factor=1.5, **how)
    wanted = root_route(*tensors(given), 6, 1.5)
    np.testing.assert_array_equal(got[1], wanted[1].numpy())
    np.testing.assert_allclose(got[0], wanted[0].numpy(), rtol=3e-6, atol=1e-7)
    wrong: list[Given] = [{"bias": None}] if not hashed else [
        {"tokens": given["tokens"] + 9}, {"tokens": given["tokens"][:1].copy()},
        {"table": table[:, :5].copy()}, {"table": table + 40}, {"table": table * F(np.nan)},
    ]  # fmt: skip
    for changes in wrong:
        check_refused("", "Route", given | changes, results, factor=1.5, **how)
    given["logits"][1, 2, 7] = np.nan
    weights, _ = run("Route", given, results, 1, factor=1.5, **how)
    assert (np.isnan(weights).all(-1) == (np.arange(10).reshape(2, 5) == 7)).all()


@pytest.mark.parametrize("rows", [3, 50])
@pytest.mark.parametrize(("outputs", "groups"), [(12, 2), (256, 2), (600, 3)])
@pytest.mark.parametrize("bits", [32, 8, 4])
def test_products_by_group(
    bits: int, outputs: int, groups: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group is multiplied as by a weight of its own."""
    rng, K = np.random.default_rng(outputs), 64
    x = rng.standard_normal((1, rows, groups * K), F)
    if bits == 32:
        weight = torch.from_numpy(rng.standard_normal((K, outputs), F))
        packed: Given = {"values": pack_floats(weight).numpy(), "scales": None}
    else:
        codes = torch.from_numpy(rng.integers(0, 256, (outputs, K // 32, 4 * bits), np.uint8))
        scales = torch.from_numpy(rng.random((outputs, K // 32), F) / F(1 << bits)).half()
        packed = {"values": pack_values(codes).numpy(), "scales": pack_scales(scales).numpy()}
    given = {"x": x, **packed}
    (got,) = same_everywhere(monkeypatch, "Product", given, ONE, N=outputs, groups=groups)
    each = outputs // groups
    for g in {0, 1, groups - 1}:
        part = x[..., g * K : (g + 1) * K].copy()
        (own,) = run("Product", {"x": part, **packed}, ONE, 1, N=outputs)
        own = own[..., g * each : (g + 1) * each]
        np.testing.assert_array_equal(got[..., g * each : (g + 1) * each], own)
    wanted = product_packed(*tensors(given), outputs, groups).numpy()
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=0.1 if bits < 32 else 1e-4)
    check_refused("", "Product", given | {"x": x[..., 1:].copy()}, ONE, N=outputs, groups=groups)
    check_refused("", "Product", given, ONE, N=outputs, groups=groups + 1)
