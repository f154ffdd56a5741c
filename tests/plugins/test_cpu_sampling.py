"""Operators of sampling: they equal their definitions, on every instruction set."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mtpbuild.plugins import draw, shaped_probs
from tests.support.cpu_kernels import Results, check_refused, run, same_everywhere

F = np.float32
DRAWN = (np.int64, F)
SETTINGS = [  # temperature, top_k, top_p, min_p: none, each alone, all together, and greedy
    (0.7, 0, 1.0, 0.0), (1.3, 5, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (0.5, 0, 1.0, 0.1),
    (1.0, 40, 0.8, 0.05), (1.0, 1, 0.5, 0.0), (1.0, 1 << 40, 1e-9, 0.0), (0.0, 3, 0.1, 0.5),
]  # fmt: skip


def settings_of(rows: list[tuple[float, int, float, float]]) -> dict[str, NDArray[Any]]:
    names = ("temperature", "top_k", "top_p", "min_p")
    kinds = (F, np.int64, F, F)
    columns = zip(names, zip(*rows, strict=True), kinds, strict=True)
    return {name: np.array(column, kind) for name, column, kind in columns}


def reference(op: Any, operands: dict[str, NDArray[Any]]) -> Any:
    return op(*map(torch.from_numpy, operands.values()))


@pytest.mark.parametrize("size", [1, 7, 16, 300, 20_000])
def test_a_distribution_is_shaped(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows as random, with ties, with forbidden tokens, and with one token far above the others."""
    rng = np.random.default_rng(size)
    logits = 3 * rng.standard_normal((len(SETTINGS), 4, size), F)
    logits[:, 1] = np.round(logits[:, 1])
    logits[:, 2, 1::2] = -np.inf
    logits[:, 3, 0] = 200.0
    operands = {"logits": logits, **settings_of(SETTINGS)}
    (probs,) = same_everywhere(monkeypatch, "ShapedProbs", operands, (F,))
    wanted = reference(shaped_probs, operands).numpy()
    np.testing.assert_array_equal(probs > 1e-30, wanted > 1e-30)
    np.testing.assert_allclose(probs, wanted, rtol=2e-5, atol=1e-30)
    assert (probs[:, 2, 1::2] == 0).all()  # a forbidden token has no chance at all


def test_settings_that_do_not_fit_are_refused() -> None:
    operands = {"logits": np.zeros((2, 1, 4), F), **settings_of(SETTINGS[:2])}
    for name in operands:
        check_refused("", "ShapedProbs", {**operands, name: operands[name][:1]}, (F,))


def test_logits_that_are_no_numbers_leave_other_rows_as_they_are() -> None:
    operands = {"logits": np.ones((8, 2, 50), F), **settings_of(SETTINGS)}
    (good,) = run("ShapedProbs", operands, (F,), 1)
    for wrong in (np.nan, np.inf):
        operands["logits"][:, 1, 20] = wrong
        (probs,) = run("ShapedProbs", operands, (F,), 1)
        assert np.isnan(probs[:, 1]).any(-1).all()
        np.testing.assert_array_equal(probs[:, 0], good[:, 0])


def drawn(weights: NDArray[Any], uniform: NDArray[Any], patch: pytest.MonkeyPatch) -> Results:
    return same_everywhere(patch, "Draw", {"p": weights, "uniform": uniform}, DRAWN)


@pytest.mark.parametrize("size", [1, 5, 256, 257, 20_000])
def test_a_token_is_drawn(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the definition's in fp64, except where the number lies on a cell's border."""
    rng = np.random.default_rng(size)
    weights = rng.random((3, 50, size), F) ** 8
    weights[0, :, size // 3 : size // 2] = 0.0
    weights[1] *= 7.0  # they need not be normalised
    uniform = rng.random((3, 50), F)
    uniform[:, 0], uniform[:, 1] = 0.0, np.nextafter(F(1), F(0))
    tokens, margins = drawn(weights, uniform, monkeypatch)
    exact: Any = draw(torch.from_numpy(weights).double(), torch.from_numpy(uniform).double())
    clear = exact[1].numpy() > 1e-5
    assert clear.mean() > 0.5
    np.testing.assert_array_equal(tokens[clear], exact[0].numpy()[clear])
    np.testing.assert_allclose(margins, exact[1].numpy(), atol=1e-6)
    assert (np.take_along_axis(weights, tokens[..., None], -1) > 0).all()
    (alone, _) = run("Draw", {"p": weights[2:, 7], "uniform": uniform[2:, 7]}, DRAWN, 1)
    assert alone == tokens[2, 7]


def test_no_token_without_a_chance_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """At both ends of the row, whatever rounding does; of no chances at all the first token."""
    weights = np.zeros((4, 3000), F)
    weights[0, 700:900], weights[1, 2999], weights[2] = 1e-3, 1e-30, np.nan
    for number in (0.0, 0.5, np.nextafter(F(1), F(0))):
        tokens, _ = drawn(weights, np.full(4, number, F), monkeypatch)
        assert 700 <= tokens[0] < 900
        assert [*tokens[1:]] == [2999, 0, 0]
    check_refused("", "Draw", {"p": weights, "uniform": np.zeros(3, F)}, DRAWN)
