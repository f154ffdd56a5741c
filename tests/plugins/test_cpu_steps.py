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
    grouped_rows,
    rotary_rows,
    take_rows,
    weigh_experts,
)
from mtpbuild.plugins.cpu.layout import pack_floats, pack_scales, pack_values
from tests.support import exact
from tests.support.cpu_kernels import check_refused, random_weight, run, same_everywhere

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


def test_a_float_embedding() -> None:
    table = np.random.default_rng(0).standard_normal((7, 5), np.float32)
    given: Given = {"tokens": np.array([[0, 6, 3], [3, 3, 1]]), "table": table}
    [got] = run("Embedding", given, (F,), 1)
    np.testing.assert_array_equal(got, table[given["tokens"]])
    for wrong in (7, -1):
        check_refused(
            f"no token {wrong} of 7", "Embedding", given | {"tokens": np.array([wrong])}, (F,)
        )


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


def grouped(T: int, H: int, G: int, D: int, half: int, others: int) -> Given:
    rng = np.random.default_rng(D + H)
    B, S = 2, 9
    shapes: dict[str, tuple[int, ...]] = {"a": (B, T, (H + 2 * G) * D + others)}
    shapes |= {"q_norm": (D,), "k_norm": (D,), "cos": (B, T, half), "sin": (B, T, half)}
    shapes["cache"] = (B, 1, S, 2 * G * D)
    given: Given = {name: rng.standard_normal(s, np.float32) for name, s in shapes.items()}
    return given | {"start": np.array([0, S - T])}


ROWS = ("GroupedRows", (F, F, F))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize(
    ("T", "H", "G", "D", "half", "others"),
    [(3, 4, 2, 64, 32, 0), (1, 2, 1, 256, 32, 512), (2, 3, 3, 80, 16, 7)],
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
    how: dict[str, Any] = {"heads": H, "groups": G, "width": D, "epsilon": 1e-6}
    how["plus_one"] = int(plus_one)
    q, fresh, cache = same_everywhere(monkeypatch, ROWS[0], given, ROWS[1], **how)
    a, *norms, cos, sin, kept, _ = given.values()

    def turned(x: NDArray[np.float32], norm: NDArray[Any] | None) -> NDArray[np.float32]:
        x = x.reshape(2, T, -1, D)
        if norm is not None:
            weight = norm + F(1) if plus_one else norm
            x = exact.norm(x.reshape(-1, D), weight, 1e-6).reshape(x.shape)
        y, one, two = x.copy(), x[..., :half], x[..., half : 2 * half]
        c, s = cos[:, :, None], sin[:, :, None]
        y[..., :half], y[..., half : 2 * half] = one * c - two * s, two * c + one * s
        return y.reshape(2, T, -1)

    ends = np.cumsum([H * D, others, G * D])
    queries, passed, keys, values = np.split(a, ends, axis=-1)
    wanted = np.concatenate([turned(queries, norms[0]), passed], -1)
    np.testing.assert_array_equal(q, wanted)
    rows = np.concatenate([turned(keys, norms[1]), values], -1)
    np.testing.assert_array_equal(fresh[:, 0], rows)
    held = kept.copy()
    held[0, 0, :T], held[1, 0, 9 - T :] = rows[0], rows[1]
    np.testing.assert_array_equal(cache, held)
    unwritten = run(ROWS[0], {**given, "cache": None, "start": None}, ROWS[1][:2], 1, **how)
    np.testing.assert_array_equal(unwritten[1], fresh)
    operands = dict(zip(given, tensors(given), strict=True))
    order = [operands[name] for name in ("a", "q_norm", "k_norm", "cos", "sin")]
    for found, each in zip((q, fresh), grouped_rows(*order, H, G, D, 1e-6, plus_one), strict=True):
        np.testing.assert_allclose(found, each.numpy(), rtol=1e-5, atol=1e-5)


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
    given, how = grouped(3, 4, 2, 64, 32, 0), {"heads": 4, "groups": 2, "width": 64}
    sizes = {name: value for name, value in change.items() if name in how}
    for name in change.keys() - sizes.keys():
        given[name] = np.zeros(change[name], INT if name == "start" else F)
    check_refused("", ROWS[0], given, ROWS[1], **how | sizes, epsilon=1e-6, plus_one=0)


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


@pytest.mark.parametrize("bits", [None, 8])
def test_a_bias(bits: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product adds one number to each output, as it adds a sum."""
    rng = np.random.default_rng(1)
    N, K = 70, 64
    given: Given = {"x": rng.standard_normal((2, 3, K), np.float32)}
    if bits is None:
        weight = torch.from_numpy(rng.standard_normal((K, N), np.float32))
        given |= {"values": pack_floats(weight).numpy(), "scales": None}
    else:
        values, scales, _ = random_weight(rng, (N, K), bits)
        given |= {"values": pack_values(values).numpy(), "scales": pack_scales(scales).numpy()}
    bias = rng.standard_normal(N, np.float32)
    [plain] = run("Product", given, (F,), 1, N=N)
    [got] = same_everywhere(monkeypatch, "Product", given | {"norm": None, "sum": bias}, (F,), N=N)
    np.testing.assert_array_equal(got, plain + bias)
