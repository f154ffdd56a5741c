"""Rows of caches: the CPU's operators compute them, and round them once to the cache's type."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mtpbuild.builder.plan.plan import count_int8_width
from mtpbuild.plugins import grouped_rows_write, mla_rows_write
from mtpbuild.plugins.int8_rows import read_rows, round_rows
from mtpbuild.plugins.stream_rows.op import stream_rows_write
from mtpbuild.runtime.programs.slots import finite
from tests.support import exact
from tests.support.cpu_kernels import check_refused, run, same_everywhere
from tests.support.exact import Floats

F = np.float32
FLOATS = (F, F, F)
B, T, S = 2, 3, 9  # slots, tokens, rows of a cache
Given = dict[str, Any]


def draw(seed: int, **shapes: tuple[int, ...]) -> Given:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, F) for name, shape in shapes.items()}


def tensors(given: Given) -> list[Any]:
    return [None if x is None else torch.as_tensor(x) for x in given.values()]


def halved(x: NDArray[Any]) -> Floats:
    """Round to bfloat16, as PyTorch does."""
    return np.asarray(torch.from_numpy(x).bfloat16().float().numpy())


def rounded(rows: NDArray[Any], sections: list[int]) -> NDArray[np.int8]:
    return np.asarray(round_rows(torch.from_numpy(rows), sections).numpy())


def check_rows(
    op: str,
    given: Given,
    sections: list[int],
    definition: Callable[..., Any],
    patch: pytest.MonkeyPatch,
    **how: Any,
) -> tuple[Floats, Floats]:
    """Check rows in caches of all types, and return the queries and the fresh rows in fp32."""
    tokens = given["a"].shape[1]
    cache = draw(5, cache=(B, 1, S, sum(sections)))["cache"]
    start = np.array([0, S - tokens])
    types = {
        "": (cache, F),
        "Bf16": (torch.from_numpy(cache).bfloat16(), torch.bfloat16),
        "Int8": (rounded(cache, sections), np.int8),
    }
    results: dict[str, Any] = {}
    for suffix, (held, kind) in types.items():
        operands = given | {"cache": held, "start": start}
        got = same_everywhere(patch, op + suffix, operands, (F, F, kind), **how)
        wanted = definition(*tensors(operands))
        assert wanted[2].dtype == torch.as_tensor(held).dtype
        near = 2**-7 if suffix == "Bf16" else 1e-5
        for one, other in zip(got[:2], wanted, strict=False):
            np.testing.assert_allclose(one, other.float().numpy(), rtol=near, atol=1e-5)
        if suffix == "Int8":
            rows, right = (read_rows(torch.as_tensor(x), sections) for x in (got[2], wanted[2]))
            np.testing.assert_allclose(rows, right, atol=float(rows.abs().max()) / 100)
        else:
            np.testing.assert_allclose(got[2], wanted[2].float(), rtol=near, atol=1e-5)
        results[suffix] = got

    q, fresh, kept = results[""]
    written = cache.copy()
    written[0, :, :tokens], written[1, :, S - tokens :] = fresh[0], fresh[1]
    np.testing.assert_array_equal(kept, written)
    for suffix, (queries, rows, held) in results.items():
        np.testing.assert_array_equal(queries, q)
        np.testing.assert_array_equal(rows, halved(fresh) if suffix == "Bf16" else fresh)
        if suffix == "Bf16":
            np.testing.assert_array_equal(held, halved(kept))
        if suffix == "Int8":
            np.testing.assert_array_equal(held, rounded(kept, sections))
    unwritten = run(op, given | {"cache": None, "start": None}, FLOATS[:2], 1, **how)
    np.testing.assert_array_equal(unwritten[0], q)
    np.testing.assert_array_equal(unwritten[1], fresh)
    beyond = given | {"cache": cache, "start": start + np.array([0, 1])}
    says = f"{tokens} rows from {S - tokens + 1} on in a cache of {S}"
    check_refused(says, op, beyond, FLOATS, **how)
    return q, fresh


def turn_pairs(x: Floats, cos: Floats, sin: Floats, interleaved: bool) -> Floats:
    """Rotate the first values of x [.., C] by cos, sin [.., half]."""
    half = cos.shape[-1]
    first = np.s_[..., 0 : 2 * half : 2] if interleaved else np.s_[..., :half]
    second = np.s_[..., 1 : 2 * half : 2] if interleaved else np.s_[..., half : 2 * half]
    y = x.copy()
    y[first] = x[first] * cos - x[second] * sin
    y[second] = x[second] * cos + x[first] * sin
    return y


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("latent", [24, 72])
def test_latent_rows(
    interleaved: bool, normed: bool, latent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Q, half = 40, 6
    given = draw(7, a=(B, T, Q + latent + 2 * half), q_norm=(Q,), kv_norm=(latent,))
    given |= draw(8, cos=(B, T, half), sin=(B, T, half))
    if not normed:
        given["q_norm"] = None
    how = {"epsilon": 1e-6, "interleaved": int(interleaved)}

    def definition(*operands: Any) -> Any:
        return mla_rows_write(*operands, 1e-6, interleaved)

    sections = [latent, 2 * half]
    q, fresh = check_rows("LatentRows", given, sections, definition, monkeypatch, **how)
    a, q_norm, kv_norm, cos, sin = given.values()
    queries, latents, keys = np.split(a, [Q, Q + latent], axis=-1)
    if normed:
        queries = exact.norm(queries.reshape(-1, Q), q_norm, 1e-6).reshape(B, T, Q)
    np.testing.assert_array_equal(q, queries)
    latents = exact.norm(latents.reshape(-1, latent), kv_norm, 1e-6).reshape(B, T, latent)
    rows = np.concatenate([latents, turn_pairs(keys, cos, sin, interleaved)], axis=-1)
    np.testing.assert_array_equal(fresh, rows[:, None])


def test_rows_that_are_normed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    Q, D, half = 40, 72, 6
    given = draw(7, a=(B, T, Q + D), q_norm=(Q,), kv_norm=(D,), cos=(B, T, half), sin=(B, T, half))
    how = {"epsilon": 1e-6, "interleaved": 1, "whole": 1}

    def definition(*operands: Any) -> Any:
        return stream_rows_write(*operands, 1e-6, ring=False)

    sections = [D - 2 * half, 2 * half]
    q, fresh = check_rows("LatentRows", given, sections, definition, monkeypatch, **how)
    a, q_norm, kv_norm, cos, sin = given.values()
    latents, last = (x.reshape(-1, x.shape[-1]) for x in np.split(a, [Q], axis=-1))
    np.testing.assert_array_equal(q, exact.norm(latents, q_norm, 1e-6).reshape(B, T, Q))
    rows = exact.norm(last, kv_norm, 1e-6).reshape(B, T, D)
    rows[..., -2 * half :] = turn_pairs(rows[..., -2 * half :], cos, sin, interleaved=True)
    np.testing.assert_array_equal(fresh[:, 0], rows)
    cache, start = draw(5, cache=(B, 1, S, D))["cache"], np.array([-1, S - 2])
    ring = run("LatentRows", given | {"cache": cache, "start": start}, FLOATS, 1, **how, ring=1)
    cache[1, 0, [S - 2, S - 1, 0]] = rows[1]  # an idle slot's rows stay
    np.testing.assert_array_equal(ring[2], cache)
    wide = draw(0, cos=(B, T, 37), sin=(B, T, 37))
    check_refused("", "LatentRows", given | wide, FLOATS[:2], **how)


def grouped(T: int, H: int, G: int, D: int, half: int, others: int) -> Given:
    angles = (B, T, half)
    shapes = {"a": (B, T, (H + 2 * G) * D + others), "q_norm": (D,), "k_norm": (D,)}
    return draw(D + H, **shapes, cos=angles, sin=angles)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize(
    ("T", "H", "G", "D", "half", "others"),
    [(3, 4, 2, 64, 32, 0), (1, 2, 1, 256, 32, 512), (2, 3, 3, 80, 16, 7), (3, 4, 2, 40, 6, 0)],
)
def test_grouped_rows(
    normed: bool,
    plus_one: bool,
    T: int,
    H: int,
    G: int,
    D: int,
    half: int,
    others: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = grouped(T, H, G, D, half, others)
    if not normed:
        given |= {"q_norm": None, "k_norm": None}
    how = {"heads": H, "groups": G, "width": D, "epsilon": 1e-6, "plus_one": int(plus_one)}

    def definition(*operands: Any) -> Any:
        return grouped_rows_write(*operands, H, G, D, 1e-6, plus_one)

    sections = 2 * G * [D]
    q, fresh = check_rows("GroupedRows", given, sections, definition, monkeypatch, **how)
    a, q_norm, k_norm, cos, sin = given.values()

    def turned(x: Floats, norm: Floats | None) -> Floats:
        x = x.reshape(B, T, -1, D)
        if norm is not None:
            weight = norm + F(1) if plus_one else norm
            x = exact.norm(x.reshape(-1, D), weight, 1e-6).reshape(x.shape)
        return turn_pairs(x, cos[:, :, None], sin[:, :, None], False).reshape(B, T, -1)

    ends = np.cumsum([H * D, others, G * D])
    queries, passed, keys, values = np.split(a, ends, axis=-1)
    np.testing.assert_array_equal(q, np.concatenate([turned(queries, q_norm), passed], -1))
    rows = np.concatenate([turned(keys, k_norm), values], -1)
    np.testing.assert_array_equal(fresh[:, 0], rows)


@pytest.mark.parametrize(
    "change",
    [
        {"heads": 9},
        {"groups": 0},
        {"groups": 3},
        {"width": 0},
        {"width": 1 << 60},
        {"heads": 1 << 60, "width": 16},
        {"q_norm": (63,)},
        {"k_norm": (1, 64)},
        {"cos": (2, 3, 31)},
        {"cos": (2, 3, 40), "sin": (2, 3, 40)},
        {"cache": (2, 1, 9, 255)},
        {"start": (3,)},
    ],
)
def test_damaged_grouped_rows(change: dict[str, Any]) -> None:
    given = grouped(3, 4, 2, 64, 32, 0) | draw(0, cache=(B, 1, S, 256))
    given["start"] = np.array([0, S - 3])
    how = {"heads": 4, "groups": 2, "width": 64}
    sizes = {name: value for name, value in change.items() if name in how}
    for name in change.keys() - sizes.keys():
        given[name] = np.zeros(change[name], np.int64 if name == "start" else F)
    check_refused("", "GroupedRows", given, FLOATS, **how | sizes, epsilon=1e-6, plus_one=0)


def copied_rows(row: NDArray[Any], cache: Any) -> Given:
    """Operands with which a row of a key and a value is only rounded."""
    given: Given = {"a": row.reshape(1, 1, -1), "q_norm": None, "k_norm": None}
    angles = np.zeros((1, 1, 0), F)
    return given | {"cos": angles, "sin": angles, "cache": cache, "start": np.array([1])}


@pytest.mark.parametrize("size", [1.0, 2e-5, 3e-38, 0.0, 1e6, 9e6, np.inf, np.nan])
def test_rounding_to_int8(size: float) -> None:
    """Scales that are subnormal in fp16, zero, or do not fit."""
    row = np.linspace(-1, 1, 80, dtype=F)
    row[40] = size
    small = (row * 3e-5 if size < 1 else row).astype(F)
    width = count_int8_width(80, [40])
    given = copied_rows(small, np.zeros((1, 1, 2, width), np.int8))
    how = {"heads": 0, "groups": 1, "width": 40, "epsilon": 1e-6, "plus_one": 0}
    _, _, held = run("GroupedRowsInt8", given, (F, F, np.int8), 1, **how)
    again = rounded(small, [40, 40])
    assert held[0, 0, 1, :80].tobytes() == again[:80].tobytes()
    assert finite(held[0, 0]).all(-1).tolist() == [True, bool(size < 9e6)]
    rows, right = (read_rows(torch.from_numpy(x), [40, 40]) for x in (held[0, 0, 1], again))
    np.testing.assert_array_equal(rows, right)


def test_rounding_to_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties to even, no overflow but where there is one, a NaN stays one."""
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF800000, 0x80000001])
    values = np.concatenate([bits.astype(np.uint32).view(F), np.array([np.nan], F)])
    row = np.concatenate([np.zeros(7, F), values])
    given = copied_rows(row, torch.zeros(1, 1, 2, 14, dtype=torch.bfloat16))
    how = {"heads": 0, "groups": 1, "width": 7, "epsilon": 1e-6, "plus_one": 0}
    types = (F, F, torch.bfloat16)
    _, fresh, _ = same_everywhere(monkeypatch, "GroupedRowsBf16", given, types, **how)
    np.testing.assert_array_equal(fresh[0, 0, 0, 7:], halved(values))
