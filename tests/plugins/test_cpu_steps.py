"""The CPU's operators between layers, and around grouped attention's products.

Each equals its arithmetic in NumPy, or PyTorch's definition, on every instruction set, and refuses
what does not fit.
"""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mtpbuild.plugins import (
    grouped_attention_flat,
    rotary_rows,
    take_rows,
    weigh_experts,
)
from tests.support.cpu_kernels import check_refused, run, same_everywhere

F, INT = np.float32, np.int64
Given = dict[str, Any]


def tensors(given: Given) -> list[Any]:
    return [None if x is None else torch.from_numpy(x) for x in given.values()]


@pytest.mark.parametrize("kind", [F, INT])
@pytest.mark.parametrize(("shape", "count"), [((2, 7), 3), ((2, 7, 5), 1), ((2, 4, 2, 3), 4)])
def test_take(kind: type, shape: tuple[int, ...], count: int) -> None:
    rng = np.random.default_rng(count)
    x: NDArray[Any] = rng.integers(0, 100, shape).astype(kind)
    given: Given = {"x": x, "start": np.array([0, shape[1] - count])}
    op = "Take" if kind is F else "TakeInts"
    [got] = run(op, given, (kind,), 1, count=count)
    np.testing.assert_array_equal(got, take_rows(*tensors(given), count).numpy())
    for wrong in ([0, shape[1] - count + 1], [-1, 0]):
        check_refused(
            f"{count} rows from", op, given | {"start": np.array(wrong)}, (kind,), count=count
        )
    for wrong_count in (0, 99):
        check_refused(f"{wrong_count} rows of", op, given, (kind,), count=wrong_count)
    check_refused(f"{count} rows of", op, given | {"start": np.zeros(3, INT)}, (kind,), count=count)


@pytest.mark.parametrize("kind", [F, INT])
@pytest.mark.parametrize("sizes", [(2, 3), (1, 1, 4), (5, 0, 1, 2)])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_join(kind: type, sizes: tuple[int, ...], axis: int) -> None:
    shapes = [[3, 2, 4] for _ in sizes]
    for shape, size in zip(shapes, sizes, strict=True):
        shape[axis] = size
    rng = np.random.default_rng(axis)
    parts: list[NDArray[Any]] = [rng.integers(0, 100, s).astype(kind) for s in shapes]
    given: Given = {f"x{i}": part for i, part in enumerate(parts)}
    op = "Join" if kind is F else "JoinInts"
    [got] = run(op, given, (kind,), 1, axis=axis)
    np.testing.assert_array_equal(got, np.concatenate(parts, axis))
    for wrong in (-1, 3):
        check_refused("", op, given, (kind,), axis=wrong)
    for wrong_shape in ([3, 2], [9, 9, 9]):
        other: NDArray[Any] = np.zeros(wrong_shape, kind)
        check_refused(".* beside", op, given | {"x1": other}, (kind,), axis=axis)


@pytest.mark.parametrize("V", [1, 16, 700, 5000])
def test_arg_max(V: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(V).standard_normal((2, 3, V), np.float32)
    x[0, 1, V // 2 :] = 9.0  # of equal ones the first counts
    x[1, 2] = -3.4e38
    [got] = same_everywhere(monkeypatch, "ArgMax", {"x": x}, (INT,))
    np.testing.assert_array_equal(got, x.argmax(-1))


@pytest.mark.parametrize("idle", [None, 1])
def test_places(idle: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    B, half, T = 3, 5, 4
    active = None if idle is None else np.arange(B) != idle
    inv_freq = (1e4 ** -(np.arange(half) / half)).astype(F)
    given: Given = {
        "start": np.array([0, 7, 4000]),
        "active": active,
        "inv_freq": inv_freq,
        "tokens": np.array(T),
        "end": np.array(60),
    }
    types = (F, F, INT, INT, INT)
    got = same_everywhere(monkeypatch, "Places", given, types, offset=2, scale=1.25)
    start, seen, frequencies, *_ = tensors(given)
    wanted = rotary_rows(start, seen, frequencies, T, 2, 60, 1.25)
    for found, each in zip(got[2:], wanted[2:], strict=True):
        np.testing.assert_array_equal(found, each.numpy())
    angles = (got[3][:, None] + 2 + np.arange(T)).astype(F)[..., None] * inv_freq
    for found, op in zip(got[:2], ("Cos", "Sin"), strict=True):
        [circle] = run(op, {"x": angles}, (F,), 1)
        np.testing.assert_array_equal(found, circle * F(1.25))
    check_refused(
        "no number, but", "Places", given | {"end": np.array([1, 2])}, types, offset=0, scale=1.0
    )
    check_refused("start", "Places", given | {"tokens": np.array(-1)}, types, offset=0, scale=1.0)


@pytest.mark.parametrize("always", [0, 1, 2])
def test_weighed_experts(always: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(always)
    routed, inner, chosen = 6, 16, 2
    x = rng.standard_normal((2, 3, (routed + always) * inner), np.float32)
    weights = rng.random((2, 3, chosen), np.float32)
    ids = np.stack([rng.permutation(routed)[:chosen] for _ in range(6)]).reshape(2, 3, chosen)
    given: Given = {"x": x, "weights": weights, "ids": ids.astype(np.int32)}
    how = {"experts": routed + always, "always": always}
    [got] = same_everywhere(monkeypatch, "Weigh", given, (F,), **how)
    np.testing.assert_array_equal(got, weigh_experts(*tensors(given), **how).numpy())
    every = np.zeros((2, 3, routed + always), F)
    every[..., routed:] = 1
    np.put_along_axis(every, ids, weights, -1)
    np.testing.assert_array_equal(got, x * every.repeat(inner, -1))
    for wrong in ({"experts": 5}, {"experts": 0}, {"always": 99}, {"always": -1}):
        check_refused("", "Weigh", given, (F,), **how | wrong)


@pytest.mark.parametrize(("H", "G", "D"), [(4, 2, 64), (6, 1, 256)])
def test_heads_side_by_side(H: int, G: int, D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(D)
    B, T, S = 2, 3, 20
    given: Given = {
        "q": rng.standard_normal((B, T, H * D), np.float32),
        "cache": rng.standard_normal((B, 1, S, 2 * G * D), np.float32),
        "fresh": rng.standard_normal((B, 1, T, 2 * G * D), np.float32),
        "base": np.array([5, 11]),
        "first": np.zeros(B, INT),
    }
    how = {"scale": D**-0.5, "groups": G, "values": G * D, "latent": D, "written": 0}
    [got] = same_everywhere(monkeypatch, "Attention", given, (F,), heads=H, **how)
    q = given["q"]
    apart = np.ascontiguousarray(q.reshape(B, T, H, D).transpose(0, 2, 1, 3))
    [wanted] = run("Attention", given | {"q": apart}, (F,), 1, **how)
    np.testing.assert_array_equal(got, wanted.transpose(0, 2, 1, 3).reshape(B, T, H * D))
    by_definition = grouped_attention_flat(*tensors(given), D**-0.5, H, G).numpy()
    np.testing.assert_allclose(got, by_definition, rtol=1e-4, atol=1e-5)
    check_refused("", "Attention", given, (F,), heads=H + 1, **how)
