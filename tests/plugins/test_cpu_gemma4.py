"""Operators that Gemma-4 alone has: they equal their definitions, on every instruction set."""

from typing import Any

import numpy as np
import pytest
import torch

from mtpbuild.plugins import norm_sum, soft_cap, softmax_route
from tests.support import exact
from tests.support.cpu_kernels import check_refused, run, same_everywhere

F = np.float32
ONE = (F,)
ROUTES = (F, np.int32)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("size", [16, 100, 7])
def test_a_normed_branch_is_added(size: int, scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(size)
    given: dict[str, Any] = {name: rng.standard_normal((5, size), F) for name in "xy"}
    given |= {"weight": rng.standard_normal(size, F), "factor": np.full(1, 0.7, F)}
    given["factor"] = given["factor"] if scaled else None
    (sums,) = same_everywhere(monkeypatch, "NormSum", given, ONE, epsilon=1e-6)
    total = given["x"] + exact.norm(given["y"], given["weight"], 1e-6)
    np.testing.assert_array_equal(sums, total * F(0.7) if scaled else total)
    operands = [None if value is None else torch.from_numpy(value) for value in given.values()]
    wanted: Any = norm_sum(*operands, 1e-6)
    np.testing.assert_allclose(sums, wanted.numpy(), rtol=1e-5, atol=1e-6)
    for name, value in (("x", given["x"][1:]), ("weight", np.ones(size + 1, F))):
        check_refused("", "NormSum", given | {name: value}, ONE, epsilon=1e-6)
    check_refused("", "NormSum", given | {"factor": np.ones(2, F)}, ONE, epsilon=1e-6)


@pytest.mark.parametrize("count", [5, 16, 9000])
def test_logits_are_capped(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.linspace(-400, 400, 2 * count, dtype=F).reshape(2, count)
    (capped,) = same_everywhere(monkeypatch, "SoftCap", {"x": x}, ONE, cap=30.0)
    wanted = soft_cap(torch.from_numpy(x).double(), 30.0)
    np.testing.assert_allclose(capped, wanted.numpy(), rtol=3e-7, atol=30 * 2e-7)
    assert (np.diff(capped.reshape(-1)) >= 0).all()
    for i in (0, count - 1):  # a number's result does not depend on its place
        (alone,) = run("SoftCap", {"x": x[:, i : i + 1]}, ONE, 1, cap=30.0)
        np.testing.assert_array_equal(alone, capped[:, i : i + 1])


@pytest.mark.parametrize(("count", "chosen"), [(4, 4), (20, 3), (128, 8)])
def test_experts_are_chosen_by_logits(
    count: int, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(count)
    logits = 3 * rng.standard_normal((9, count), F)
    logits[3] = np.round(logits[3])  # ties go to the lowest id
    logits[4] = 0.0
    given = {"logits": logits, "scales": rng.random(count, F) + F(0.5)}
    weights, ids = same_everywhere(monkeypatch, "SoftmaxRoute", given, ROUTES, experts=chosen)
    wanted = softmax_route(*map(torch.from_numpy, given.values()), chosen)
    np.testing.assert_array_equal(ids, wanted[1].numpy())
    np.testing.assert_allclose(weights, wanted[0].numpy(), rtol=1e-6)
    for wrong in (0, count + 1):
        check_refused("logits", "SoftmaxRoute", given, ROUTES, experts=wrong)


def test_routes_of_what_is_no_number_stay_inside() -> None:
    logits = np.full((2, 8), np.nan, F)
    logits[1, 3] = np.inf
    given = {"logits": logits, "scales": np.ones(8, F)}
    weights, ids = run("SoftmaxRoute", given, ROUTES, 1, experts=4)
    assert np.isnan(weights).all()
    assert all(len({*row}) == 4 and {*row} <= {*range(8)} for row in ids.tolist())


@pytest.mark.parametrize("count", [5, 16, 2064])
def test_gates_by_gelu(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number's gate does not depend on its place."""
    rng = np.random.default_rng(count)
    x, z = (rng.standard_normal((2, 3, count)).astype(F) for _ in range(2))
    (gated,) = same_everywhere(monkeypatch, "Gate", {"x": x, "z": 4 * z}, ONE, gelu=1)
    gate = torch.nn.functional.gelu(4 * torch.from_numpy(z).double(), approximate="tanh")
    np.testing.assert_allclose(gated, x * gate.numpy(), rtol=1e-5, atol=1e-6)
    (alone,) = run("Gate", {"x": x[..., -1:], "z": 4 * z[..., -1:]}, ONE, 1, gelu=1)
    np.testing.assert_array_equal(alone, gated[..., -1:])
