"""The CPU's operators around latent attention's products, and routing and acceptance.

Each equals its arithmetic in NumPy to the bit on every instruction set, and refuses what does not
fit.
"""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mtpbuild.plugins import accept_rewind, mla_packed, moe_route
from tests.support import exact
from tests.support.cpu_kernels import attended, check_refused, run, same_everywhere
from tests.support.cpu_weights import draw_packed


def rotated(
    x: NDArray[np.float32], cos: NDArray[np.float32], sin: NDArray[np.float32], interleaved: bool
) -> NDArray[np.float32]:
    """Rotate x [.., 2 * half] by cos, sin [.., half]."""
    half = x.shape[-1] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    y = np.empty_like(x)
    parts = (y[..., 0::2], y[..., 1::2]) if interleaved else (y[..., :half], y[..., half:])
    parts[0][:], parts[1][:] = a * cos - b * sin, b * cos + a * sin
    return y


@pytest.mark.parametrize("kinds", [("float32", "float32"), ("int8", "int8"), ("int4", "float32")])
@pytest.mark.parametrize(("B", "T", "interleaved"), [(1, 4, True), (2, 1, False), (1, 50, False)])
def test_attention(
    kinds: tuple[str, str], B: int, T: int, interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(B + T)
    H, n, latent, half, v, S = 3, 32, 64, 4, 20, 70
    uk = draw_packed(rng, kinds[0], (H, latent, n))
    uv = draw_packed(rng, kinds[1], (H, v, latent))
    given: dict[str, Any] = {
        "q": rng.standard_normal((B, T, H * (n + 2 * half)), np.float32),
        **{"w_uk": uk.values, "uk_scales": uk.scales, "w_uv": uv.values, "uv_scales": uv.scales},
        "cos": rng.standard_normal((B, T, half), np.float32),
        "sin": rng.standard_normal((B, T, half), np.float32),
        "cache": rng.standard_normal((B, 1, S, latent + 2 * half), np.float32),
        "fresh": rng.standard_normal((B, 1, T, latent + 2 * half), np.float32),
        "base": rng.integers(1, S - T, B),
        "first": np.zeros(B, np.int64),
    }
    how: dict[str, Any] = {"scale": 0.2, "groups": 1, "values": 0, "latent": latent, "written": 0}
    how |= {"N": v, "interleaved": int(interleaved)}
    [got] = same_everywhere(monkeypatch, "LatentAttention", given, (np.float32,), **how)
    q, cos, sin = (given[name] for name in ("q", "cos", "sin"))
    nope = q[..., : H * n].reshape(B, T, H, n)
    pe = q[..., H * n :].reshape(B, T, H, 2 * half)
    pe = rotated(pe, cos[:, :, None], sin[:, :, None], interleaved)
    absorbed = [
        uk.multiply(nope[:, :, h].reshape(-1, n), h).reshape(B, T, latent) for h in range(H)
    ]
    queries = np.concatenate([np.stack(absorbed, 1), pe.transpose(0, 2, 1, 3)], axis=-1)
    rows: dict[str, Any] = {name: given[name] for name in ("cache", "fresh", "base", "first")}
    mixed = attended({"q": queries, **rows}, 0.2, latent)
    values = [uv.multiply(mixed[:, h].reshape(-1, latent), h).reshape(B, T, v) for h in range(H)]
    np.testing.assert_array_equal(got, np.concatenate(values, axis=-1))

    operands: list[Any] = [a if a is None else torch.from_numpy(a) for a in given.values()]
    wanted = mla_packed(*operands, 0.2, latent, v, interleaved).numpy()
    error = np.abs(got - wanted).max() / np.abs(wanted).max()
    assert error < (
        1e-5 if kinds == ("float32", "float32") else 0.05
    )  # integers round their inputs to int8
    check_refused("", "LatentAttention", {**given, "q": q[..., 1:].copy()}, (np.float32,), **how)


@pytest.mark.parametrize(
    ("X", "groups", "kept", "experts", "normalise", "always"),
    [(8, 4, 2, 2, True, 0), (20, 1, 1, 5, False, 1), (64, 8, 4, 8, True, 2)],
)
def test_route(
    X: int,
    groups: int,
    kept: int,
    experts: int,
    normalise: bool,
    always: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(X)
    logits = rng.standard_normal((9, X), np.float32)
    logits[3] = np.round(logits[3])  # ties go to the lowest id
    logits[4] = 0.0
    bias = (0.1 * rng.standard_normal(X)).astype(np.float32)
    if X == 8:
        bias[:] = 0.0
    how = {"groups": groups, "kept": kept, "experts": experts, "always": always}
    how |= {"normalise": int(normalise)}
    weights, ids = same_everywhere(
        monkeypatch, "Route", {"l": logits, "b": bias}, (np.float32, np.int32), factor=1.5, **how
    )
    operands = torch.from_numpy(logits), torch.from_numpy(bias), groups, kept, experts
    wanted = moe_route(*operands, normalise, 1.5, always)
    np.testing.assert_array_equal(ids, wanted[1].numpy())
    np.testing.assert_allclose(weights, wanted[0].numpy(), rtol=1e-6)
    scores = np.float32(1) / (np.float32(1) + exact.exp(-logits))
    chosen = np.take_along_axis(scores, ids[:, :experts].astype(np.int64), axis=1)
    total = np.zeros(len(chosen), np.float32)
    for i in range(experts):
        total = total + chosen[:, i]
    shares = chosen / (total + np.float32(1e-20))[:, None] if normalise else chosen
    np.testing.assert_array_equal(weights[:, :experts], shares * np.float32(1.5))


def test_routes_of_what_is_no_number() -> None:
    """Ids stay inside, whatever the logits are."""
    logits = np.full((2, 8), np.nan, np.float32)
    logits[1, 3] = np.inf
    how = {"groups": 4, "kept": 2, "experts": 4, "always": 0, "normalise": 1, "factor": 1.0}
    given = {"l": logits, "b": np.zeros(8, np.float32)}
    _, ids = run("Route", given, (np.float32, np.int32), 1, **how)
    assert all(len({*row}) == 4 and {*row} <= {*range(8)} for row in ids.tolist())
    check_refused("logits", "Route", given, (np.float32, np.int32), **how | {"experts": 5})


@pytest.mark.parametrize(("B", "T", "V"), [(1, 1, 2), (3, 4, 700), (2, 3, 5000), (1, 2, 16)])
def test_acceptance(B: int, T: int, V: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(V)
    logits = rng.standard_normal((B, T, V), np.float32)
    logits[0, -1, V // 2 :] = 9.0  # of equal ones the first counts
    window = rng.integers(0, V, (B, T))
    window[:, 1:] = logits.argmax(-1)[:, :-1]  # all drafts are right
    if T > 2:
        window[0, 2] += 1
    given: dict[str, Any] = {
        "logits": logits,
        "window": window,
        "num_drafts": np.full(B, T - 1),
        "lengths": rng.integers(0, 100, B),
        "active": np.ones(B, bool),
    }
    if B > 1:
        given["num_drafts"][1], given["active"][-1] = 1, B < 3
    types = (np.int64, np.int64, np.int64, np.float32, np.float32)
    got = same_everywhere(monkeypatch, "Accept", given, types)
    wanted = accept_rewind(*map(torch.from_numpy, given.values()))
    for found, each in zip(got[:3], wanted[:3], strict=True):
        np.testing.assert_array_equal(found, each.numpy())
    doubles = torch.from_numpy(logits).double()
    logprobs = doubles.amax(-1) - doubles.logsumexp(-1)
    np.testing.assert_allclose(got[3], logprobs.numpy(), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(got[4], wanted[4].numpy())
    damaged = logits.copy()
    damaged[-1, :, V // 3] = np.nan  # one logit is enough
    nan = same_everywhere(monkeypatch, "Accept", given | {"logits": damaged}, types)
    assert (nan[0][-1, : nan[1][-1]] >= 0).all()
    assert (nan[0] < V).all()
    assert np.isnan(nan[3][-1]).all()
    np.testing.assert_array_equal(nan[3][:-1], got[3][:-1])
    alone = {**given, "logits": logits[:, :1].copy(), "window": window[:, :1].copy()}
    first = run("Accept", alone, types, 1)
    np.testing.assert_array_equal(first[3], got[3][:, :1])


@pytest.mark.parametrize("V", [1, 16, 700, 5000])
def test_log_probabilities(V: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the definition's as far as rounding goes, and of each row by itself."""
    x = np.random.default_rng(V).standard_normal((2, 3, V), np.float32)
    [got] = same_everywhere(monkeypatch, "LogSoftmax", {"x": x}, (np.float32,))
    wanted = torch.from_numpy(x).double().log_softmax(-1)
    np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-6, atol=1e-6)
    [alone] = run("LogSoftmax", {"x": x[1:, 1].copy()}, (np.float32,), 1)
    np.testing.assert_array_equal(alone, got[1:, 1])


@pytest.mark.parametrize("size", [0, 1, 5, 10, 16, 37, 513, 5000])
def test_sums_of_rows(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lane i sums numbers i, i + 16, .., wherever a row lies; halves are added."""
    x = np.random.default_rng(size).standard_normal((3, 2, size), np.float32)
    [got] = same_everywhere(monkeypatch, "Sum", {"x": x}, (np.float32,))
    lanes = np.zeros((3, 2, 16), np.float32)
    for at in range(0, size, 16):
        some = x[..., at : at + 16]
        lanes[..., : some.shape[-1]] += some
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    np.testing.assert_array_equal(got, lanes[..., 0])


@pytest.mark.parametrize("V", [2, 16, 600])
def test_zeros_of_either_sign(V: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are equal, and the first one counts: which of them is read as the largest shows in no
    bit.
    """
    signs = np.random.default_rng(V).integers(0, 2, (1, 50, V))
    given = {
        "logits": np.where(signs, np.float32(0.0), np.float32(-0.0)),
        "window": np.zeros((1, 50), np.int64),
        "num_drafts": np.array([49]),
        "lengths": np.array([0]),
        "active": np.array([True]),
    }
    types = (np.int64, np.int64, np.int64, np.float32, np.float32)
    tokens, _, _, _, margins = same_everywhere(monkeypatch, "Accept", given, types)
    assert not tokens.any()
    assert not np.signbit(margins).any()
    assert not margins.any()
    same_everywhere(monkeypatch, "LogSoftmax", {"x": given["logits"]}, (np.float32,))
