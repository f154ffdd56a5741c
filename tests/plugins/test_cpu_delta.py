"""The delta rule's operators against NumPy, to the bit, and what they refuse."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mtpbuild.plugins import causal_conv, delta_advance, delta_rule, last_inputs
from tests.support import exact
from tests.support.cpu_kernels import check_refused, run, same_everywhere
from tests.support.exact import Floats, fma

F = np.float32
ONE = (np.float32,)
# Slots, tokens, heads of keys and of values, widths of keys and of values.
SHAPES = [(1, 1, 1, 1, 16, 16), (3, 5, 2, 6, 10, 7), (2, 3, 1, 2, 33, 70), (1, 40, 2, 2, 128, 128)]


def operands(shape: tuple[int, ...], seed: int = 0) -> dict[str, NDArray[np.float32]]:
    B, T, G, H, K, V = shape
    rng = np.random.default_rng(seed)

    def normal(*sizes: int) -> NDArray[np.float32]:
        return rng.standard_normal(sizes).astype(F)

    return {
        "mixed": normal(B, T, 2 * G * K + H * V),
        "ba": 3 * normal(B, T, 2 * H),
        "rate": np.exp(normal(H)),
        "bias": normal(H),
        "state": normal(B, H, K, V),
    }


def exponential(x: NDArray[np.float64]) -> NDArray[np.float64]:
    x = np.clip(x, -700.0, 700.0)
    n = np.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10
    total = np.ones_like(r)
    for i in range(13, 0, -1):
        total = 1.0 + total * r / i
    return np.ldexp(total, n.astype(np.int32))


def gates(given: dict[str, NDArray[np.float32]]) -> tuple[Floats, Floats]:
    """decay and share [B, T, H]."""
    b, a = np.split(given["ba"], 2, axis=-1)
    x = (a + given["bias"]).astype(np.float64)
    e = exponential(-np.abs(x))
    s = e / (2.0 + e)
    total = np.zeros_like(s)
    for i in range(19, 0, -2):
        total = total * (s * s) + 1.0 / i
    softplus = np.where(x > 0, x, 0.0) + 2.0 * s * total
    decay = exponential(-given["rate"].astype(np.float64) * softplus).astype(F)
    return decay, (1.0 / (1.0 + exponential(-b.astype(np.float64)))).astype(F)


def ruled(
    given: dict[str, NDArray[np.float32]], shape: tuple[int, ...], n: list[int] | None = None
) -> tuple[Floats, Floats]:
    """Compute all slots and heads token by token: outputs [B, T, H, V] and the state."""
    B, T, G, H, K, V = shape
    q, k, v = np.split(given["mixed"], [G * K, 2 * G * K], axis=-1)
    wide, narrow = np.full(K, F(1) / np.sqrt(F(K))), np.full(K, F(1) / F(K))
    epsilon = float(F(1e-6) / F(K))
    k, q = (
        exact.norm(x.reshape(-1, K), w, epsilon).reshape(B, T, G, K).repeat(H // G, 2)
        for x, w in ((k, wide), (q, narrow))
    )
    v = v.reshape(B, T, H, V)
    decay, share = gates(given)
    state, outputs = given["state"].copy(), np.zeros((B, T, H, V), F)
    for t in range(T):
        held, mixed = np.zeros((B, H, V), F), np.zeros((B, H, V), F)
        stays = np.array([n is None or t < n[slot] for slot in range(B)])[:, None, None, None]
        own = state * decay[:, t, :, None, None]
        for i in range(K):
            held = fma(k[:, t, :, i, None], own[:, :, i], held)
        step = share[:, t, :, None] * (v[:, t] - held)
        for i in range(K):
            own[:, :, i] = fma(k[:, t, :, i, None], step, own[:, :, i])
            mixed = fma(q[:, t, :, i, None], own[:, :, i], mixed)
        state, outputs[:, t] = np.where(stays, own, state), mixed
    return outputs, state


@pytest.mark.parametrize("shape", SHAPES)
def test_rule(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands(shape)
    found = same_everywhere(monkeypatch, "DeltaRule", given, ONE * 2, keeps=1)
    for got, wanted in zip(found, ruled(given, shape), strict=True):
        np.testing.assert_array_equal(got, wanted)
    reference = delta_rule(*(torch.from_numpy(x) for x in given.values()))
    for got, plain in zip(found, reference, strict=True):
        np.testing.assert_allclose(got, plain.numpy(), atol=1e-4, rtol=1e-4)
    (alone,) = run("DeltaRule", given, ONE, 1, keeps=0)
    np.testing.assert_array_equal(alone, found[0])


@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_advance(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """By each number of tokens; by none a state stays the same to the bit."""
    given, B, T = operands(shape), shape[0], shape[1]
    for n in ([0, T, 1][:B], [T - 1, 0, T + 3][:B]):
        counted = given | {"n": np.array(n)}
        (got,) = same_everywhere(monkeypatch, "DeltaAdvance", counted, ONE)
        np.testing.assert_array_equal(got, ruled(given, shape, n)[1])
        assert got[n.index(0)].tobytes() == given["state"][n.index(0)].tobytes()
        plain = delta_advance(*(torch.from_numpy(x) for x in counted.values()))
        np.testing.assert_allclose(got, plain.numpy(), atol=1e-4, rtol=1e-4)


def test_tokens_one_by_one() -> None:
    """A chunk's outputs and state are those of its tokens, and of slots alone, to the bit."""
    shape = (2, 9, 2, 4, 12, 70)
    given = operands(shape)
    whole = run("DeltaRule", given, ONE * 2, 2, keeps=1)
    for slot in range(2):
        state = given["state"][slot : slot + 1]
        for t in range(9):
            own = {x: given[x][slot : slot + 1, t : t + 1] for x in ("mixed", "ba")}
            one = given | own | {"state": state}
            y, state = run("DeltaRule", one, ONE * 2, 1, keeps=1)
            np.testing.assert_array_equal(y[0, 0], whole[0][slot, t])
        np.testing.assert_array_equal(state[0], whole[1][slot])


@pytest.mark.parametrize(("taps", "channels"), [(4, 64), (2, 37), (4, 5)])
def test_convolution(taps: int, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(taps)
    x = rng.standard_normal((2, 6, channels)).astype(F)
    tail = rng.standard_normal((2, taps - 1, channels)).astype(F)
    weight = rng.standard_normal((taps, channels)).astype(F)
    given = {"x": x, "tail": tail, "weight": weight}
    (got,) = same_everywhere(monkeypatch, "CausalConv", given, ONE)
    inputs, total = np.concatenate([tail, x], axis=1), np.zeros_like(x)
    for j in range(taps):
        total = fma(inputs[:, j : j + 6], weight[j], total)
    np.testing.assert_array_equal(got, total / (F(1) + exact.exp(F(0) - total)))
    plain = causal_conv(*map(torch.from_numpy, (x, tail, weight)))
    np.testing.assert_allclose(got, plain.numpy(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_slots_that_begin(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands in their states, NaN too, each operator computes with zeros; others stay."""
    given, B, T = operands(shape), shape[0], shape[1]
    begins = np.arange(B) % 2 == 0
    zeros = given | {"state": np.where(begins[:, None, None, None], F(0), given["state"])}
    given["state"][begins] = np.nan
    found = same_everywhere(monkeypatch, "DeltaRule", given | {"begins": begins}, ONE * 2, keeps=1)
    for got, wanted in zip(found, run("DeltaRule", zeros, ONE * 2, 2, keeps=1), strict=True):
        np.testing.assert_array_equal(got, wanted)
    n = np.array([0, T, 1][:B])
    (got,) = run("DeltaAdvance", given | {"n": n, "begins": begins}, ONE, 1)
    np.testing.assert_array_equal(got, run("DeltaAdvance", zeros | {"n": n}, ONE, 1)[0])

    x, tail = given["mixed"], np.full((B, 3, shape[1]), np.nan, F)
    x = np.ascontiguousarray(x[..., :T])
    tail[~begins] = 0.5
    plain = np.where(begins[:, None, None], F(0), tail)
    weight = np.random.default_rng(0).standard_normal((4, T)).astype(F)
    rows = {"x": x, "tail": tail, "weight": weight, "begins": begins}
    (got,) = same_everywhere(monkeypatch, "CausalConv", rows, ONE)
    (wanted,) = run("CausalConv", {"x": x, "tail": plain, "weight": weight}, ONE, 1)
    np.testing.assert_array_equal(got, wanted)
    (got,) = run("LastInputs", {"tail": tail, "inputs": x, "n": n, "begins": begins}, ONE, 1)
    kept = last_inputs(*map(torch.from_numpy, (plain, x, n)))
    np.testing.assert_array_equal(got, kept.numpy())


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_last_inputs(tokens: int) -> None:
    """Of fewer tokens than it keeps, of more, of none."""
    rng = np.random.default_rng(tokens)
    tail, x = (rng.standard_normal((3, size, 5)).astype(F) for size in (3, tokens))
    n = np.array([0, tokens, 1])
    (got,) = run("LastInputs", {"tail": tail, "inputs": x, "n": n}, ONE, 1)
    np.testing.assert_array_equal(got, last_inputs(*map(torch.from_numpy, (tail, x, n))).numpy())
    for wrong in (-1, tokens + 1):
        given = {"tail": tail, "inputs": x, "n": np.array([0, wrong, 0])}
        check_refused(f"no token {wrong} of", "LastInputs", given, ONE)


@pytest.mark.parametrize("count", [5, 16, 2064])
def test_gates(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number's gate does not depend on its place, nor on the shape of what it multiplies."""
    rng = np.random.default_rng(count)
    x, z = (rng.standard_normal((2, 3, count)).astype(F) for _ in range(2))
    s = F(1) / (F(1) + exact.exp(F(0) - z))
    silu = z / (F(1) + exact.exp(F(0) - z))
    for kind, gate in ((0, s), (1, silu)):
        (got,) = same_everywhere(monkeypatch, "Gate", {"x": x, "z": z}, ONE, silu=kind)
        np.testing.assert_array_equal(got, gate * x)
        (flat,) = run("Gate", {"x": x.reshape(-1), "z": z}, ONE, 1, silu=kind)
        np.testing.assert_array_equal(flat, got)
    check_refused("", "Gate", {"x": x[1:], "z": z}, ONE, silu=1)


def test_splits() -> None:
    x = np.arange(42, dtype=F).reshape(2, 3, 7)
    for got, wanted in zip(
        run("Split", {"x": x}, ONE * 2, 2, first=4), (x[..., :4], x[..., 4:]), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)
    for first in (0, 7):
        check_refused(f"{first} columns of", "Split", {"x": x}, ONE * 2, first=first)


def test_operands_that_do_not_fit() -> None:
    given = operands(SHAPES[1])
    for name in given:
        wrong = given | {name: given[name][..., :-1].copy()}
        check_refused("", "DeltaRule", wrong, ONE, keeps=0)
    x = np.zeros((1, 2, 3), F)
    check_refused("", "CausalConv", {"x": x, "tail": x, "weight": np.zeros((4, 3), F)}, ONE)
