"""Operators that DeepSeek-V4 alone has: they equal their definitions, on every instruction set."""

from typing import Any

import numpy as np
import pytest
import torch

from mtpbuild.plugins.compressed_rows.op import compressed_rows_write
from mtpbuild.plugins.mix_streams.op import (
    join_branch,
    mix_joined_streams,
    mix_streams,
    sum_streams,
)
from tests.support.cpu_kernels import check_refused, run, same_everywhere

F = np.float32
Given = dict[str, Any]
HOW = {"iterations": 20, "eps": 1e-6, "epsilon": 1e-6}


def draw(seed: int, **shapes: tuple[int, ...]) -> Given:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, F) for name, shape in shapes.items()}


def tensors(given: Given) -> list[Any]:
    return [None if x is None else torch.as_tensor(x) for x in given.values()]


def check_near(found: list[Any], wanted: Any) -> None:
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other.float().numpy(), rtol=2e-5, atol=2e-5)


def draw_streams(N: int, E: int, B: int = 2, T: int = 30) -> Given:
    numbers = N * (N + 2)
    given = draw(E, x=(B, T, N * E), fn=(N * E, numbers), base=(numbers,), scale=(3,), norm=(E,))
    given["fn"] *= F(E**-0.5)
    given |= draw(1, branch=(B, T, E))
    return given | {"weights": np.abs(draw(2, w=(B, T, N * (N + 1)))["w"])}


@pytest.mark.parametrize(("N", "E"), [(4, 700), (3, 24)])
def test_streams(N: int, E: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = draw_streams(N, E)
    joined = same_everywhere(monkeypatch, "MixStreams", given, (F, F, F), **HOW)
    check_near(joined, mix_joined_streams(*tensors(given), 20, 1e-6, 1e-6))
    parts = {name: given[name] for name in ("x", "branch", "weights")}
    (alone,) = same_everywhere(monkeypatch, "JoinBranch", parts, (F,))
    np.testing.assert_array_equal(alone, joined[2])
    check_near([alone], join_branch(*tensors(parts)))

    later = given | {"x": alone, "branch": None, "weights": None}
    mixed = run("MixStreams", later, (F, F), 1, **HOW)
    for one, other in zip(mixed, joined, strict=False):
        np.testing.assert_array_equal(one, other)
    check_near(mixed, mix_streams(*tensors(later)[:5], 20, 1e-6, 1e-6))
    rows = {name: given[name][1:, 7:9] for name in ("x", "branch", "weights")}
    for one, other in zip(
        run("MixStreams", given | rows, (F, F, F), 2, **HOW), joined, strict=True
    ):
        np.testing.assert_array_equal(one, other[1:, 7:9])


def test_the_heads_sum_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    given = draw(0, x=(2, 3, 4 * 40), fn=(4 * 40, 4), base=(4,), scale=(1,), norm=(40,))
    how = {"eps": 1e-6, "epsilon": 1e-6}
    found = same_everywhere(monkeypatch, "MixStreams", given, (F,), **how)
    check_near(found, sum_streams(*tensors(given), 1e-6, 1e-6))


@pytest.mark.parametrize(
    "change",
    [
        {"x": (2, 30, 95)},
        {"x": (2, 30, 0)},
        {"norm": (0,)},
        {"norm": (1, 24)},
        {"norm": (4,)},
        {"fn": (96, 23)},
        {"base": (23,)},
        {"base": (4,)},
        {"scale": (1,)},
        {"branch": (2, 29, 24)},
        {"branch": (2, 30, 12)},
        {"weights": (2, 30, 24)},
    ],
)
def test_damaged_streams(change: dict[str, Any]) -> None:
    given = draw_streams(4, 24)
    wrong = {name: shape and np.zeros(shape, F) for name, shape in change.items()}
    check_refused("", "MixStreams", given | wrong, (F, F, F), **HOW)
    if change.keys() & {"branch", "weights"}:
        parts = {name: (given | wrong)[name] for name in ("x", "branch", "weights")}
        check_refused("", "JoinBranch", parts, (F,))


SLOTS, PLACES, RING, HALF = 3, 64, 40, 3
COMPRESSED: list[Any] = [(4, 4, 16, 10), (4, 2, 16, 10), (16, 16, 20, 0)]  # r, group, D, K


def draw_compressed(r: int, group: int, D: int, K: int, T: int) -> Given:
    """Draw two slots, one of them in the middle of a row, and an idle one."""
    half = (2 if K else 1) * (D + K)
    a, caches = draw(r, a=(SLOTS, T, 2 * half)), draw(6, opened=(SLOTS, 1, RING, 2 * half))
    width = -(-(D + K) // group)
    given = a | draw(5, compressed=(SLOTS, 1, PLACES, width)) | caches
    given |= {"start": np.array([0, 21, -1])} | draw(7, bias=(r, half), norm=(D,), key_norm=(K,))
    given["key_norm"] = given["key_norm"] if K else None
    angles = (SLOTS, T // r + 2, HALF)
    return given | draw(8, cos=angles, sin=angles)


@pytest.mark.parametrize(("r", "group", "D", "K"), COMPRESSED)
def test_compressed_rows(
    r: int, group: int, D: int, K: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass writes what passes of single tokens write."""
    T, how = 18, {"group": group, "epsilon": 1e-6}
    given = draw_compressed(r, group, D, K, T)
    found = same_everywhere(monkeypatch, "CompressedRows", given, (F, F), **how)
    check_near(found, compressed_rows_write(*tensors(given), group, 1e-6))
    for name, cache in zip(("compressed", "opened"), found, strict=True):
        np.testing.assert_array_equal(cache[2], given[name][2])

    step = dict(given)
    for t in range(T):
        start = np.array([t, 21 + t, -1])
        ahead = [[start[b] // r - given["start"][b] // r + i for i in (0, 1)] for b in range(2)]
        for name in ("cos", "sin"):
            turned = np.zeros((SLOTS, 2, HALF), F)
            for b in range(2):
                turned[b] = given[name][b, np.minimum(ahead[b], given[name].shape[1] - 1)]
            step[name] = turned
        step |= {"a": given["a"][:, t : t + 1], "start": start}
        step["compressed"], step["opened"] = run("CompressedRows", step, (F, F), 1, **how)
    np.testing.assert_array_equal(step["compressed"], found[0])
    np.testing.assert_array_equal(step["opened"], found[1])


def test_compressed_rows_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    given, kind = draw_compressed(4, 4, 16, 10, 9), torch.bfloat16
    given |= {name: torch.from_numpy(given[name]).to(kind) for name in ("compressed", "opened")}
    how = {"group": 4, "epsilon": 1e-6}
    found = same_everywhere(monkeypatch, "CompressedRowsBf16", given, (kind, kind), **how)
    wanted = compressed_rows_write(*tensors(given), 4, 1e-6)
    np.testing.assert_array_equal(found[1], wanted[1].float())
    np.testing.assert_allclose(found[0], wanted[0].float(), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"a": (3, 18, 103)},
        {"a": (3, 41, 104)},
        {"compressed": (3, 1, 64, 6)},
        {"compressed": (3, 1, 37, 7)},
        {"compressed": (3, 2, 64, 7)},
        {"opened": (3, 1, 17, 104)},
        {"opened": (3, 1, 40, 96)},
        {"opened": (2, 1, 40, 104)},
        {"start": (2,)},
        {"bias": (4, 51)},
        {"bias": (2, 52)},
        {"bias": (0, 52)},
        {"norm": (17,)},
        {"norm": (2, 8)},
        {"key_norm": (4,)},
        {"key_norm": None},
        {"cos": (3, 3, HALF), "sin": (3, 3, HALF)},
        {"cos": (3, 6, 6), "sin": (3, 6, 6)},
        {"sin": (3, 6, 2)},
    ],
)
def test_damaged_compressed_rows(change: dict[str, Any]) -> None:
    given = draw_compressed(4, 4, 16, 10, 18)
    for name, shape in change.items():
        kind = np.int64 if name == "start" else F
        given[name] = None if shape is None else np.zeros(shape, kind)
    check_refused("", "CompressedRows", given, (F, F), group=4, epsilon=1e-6)
