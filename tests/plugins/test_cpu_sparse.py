"""Choice of rows: the op against its definition, and the CPU's operators to the bit."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mtpbuild.plugins import choose_rows, index_keys, mla_attention, mla_packed
from mtpbuild.plugins.cpu.layout import pack_floats
from mtpbuild.plugins.mla_attention.inductor import mla_attention_inductor
from tests.support import exact
from tests.support.choosers import choose_plainly, operands
from tests.support.cpu_kernels import check_refused, run, same_everywhere

NO_NUMBER = -2  # as op.h has it
CASES = [  # slots, tokens, rows, fresh rows, count
    (1, 1, 12, 1, 4),
    (3, 4, 30, 4, 8),
    (2, 2, 5, 6, 40),  # never as many as may be chosen
    (2, 1, 700, 2, 530),
]


@pytest.mark.parametrize("levels", [None, 2])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("slots", "tokens", "rows", "fresh", "count"), CASES)
def test_the_definition(
    slots: int, tokens: int, rows: int, fresh: int, count: int, interleaved: bool, levels: int
) -> None:
    for seed in range(3):
        given = operands(seed, slots, tokens, rows, fresh, levels)
        got = choose_rows(*given.values(), count, interleaved)
        assert torch.equal(got, choose_plainly(given, count, interleaved))


@pytest.mark.parametrize("levels", [None, 2])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("slots", "tokens", "rows", "fresh", "count"), CASES)
def test_choice(
    slots: int,
    tokens: int,
    rows: int,
    fresh: int,
    count: int,
    interleaved: bool,
    levels: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = operands(7, slots, tokens, rows, fresh, levels)
    arrays = {name: tensor.numpy() for name, tensor in given.items()}
    how = {"count": count, "interleaved": int(interleaved)}
    [got] = same_everywhere(monkeypatch, "ChooseRows", arrays, (np.int64,), **how)
    np.testing.assert_array_equal(got, choose_rows(*given.values(), count, interleaved).numpy())


def test_a_choice_is_a_tokens_own() -> None:
    """It depends neither on the tokens of its pass nor on where the rows lie, ties included."""
    given = operands(3, 1, 6, 40, 6, levels=2)
    given["base"][:], given["first"][:] = 30, 0
    arrays = {name: tensor.numpy() for name, tensor in given.items()}
    how = {"count": 8, "interleaved": 0}
    [whole] = run("ChooseRows", arrays, (np.int64,), 1, **how)
    rows = np.concatenate([arrays["cache"][:, :, :30], arrays["fresh"]], axis=2)
    for t in range(6):
        one = {name: arrays[name][:, t : t + 1].copy() for name in ("q", "weights", "cos", "sin")}
        one |= {"cache": rows[:, :, : 30 + t].copy(), "fresh": rows[:, :, 30 + t : 31 + t].copy()}
        one |= {"base": np.array([30 + t]), "first": np.array([0])}
        [alone] = run("ChooseRows", one, (np.int64,), 1, **how)
        np.testing.assert_array_equal(alone[:, 0], whole[:, t])


def test_a_score_that_is_nan_reaches_attention() -> None:
    """No row can be chosen then: all places say so, and attention to them is NaN."""
    given = operands(0, 1, 1, 20, 1)
    given["base"][:], given["cache"][0, 0, 3] = 20, float("nan")
    given["cache"][0, 0, 4:] = torch.randn(16, 19)
    given["weights"].abs_().add_(1.0)
    arrays = {name: tensor.numpy() for name, tensor in given.items()}
    [got] = run("ChooseRows", arrays, (np.int64,), 1, count=10, interleaved=0)
    assert (got == NO_NUMBER).all()
    rows = np.ones((1, 1, 20, 4), np.float32)
    operand: dict[str, NDArray[Any]] = {"q": rows[:, :, :1], "cache": rows, "fresh": rows[:, :, :1]}
    operand |= {"base": np.array([20]), "first": np.array([0]), "chosen": got}
    how = {"scale": 1.0, "groups": 1, "values": 0, "latent": 2, "written": 1}
    [y] = run("Attention", operand, (np.float32,), 1, **how)
    assert np.isnan(y).all()
    for change in ({"latent": 5}, {"values": 1}):  # a copied row is a key and no more
        wide = {name: operand[name].repeat(3, axis=-1) for name in ("cache", "fresh")}
        check_refused(
            r"\d values of chosen", "Attention", operand | wide, (np.float32,), **how | change
        )
    for wrong in ({"count": 0}, {"count": 1 << 40}):
        asked = {"count": 1, "interleaved": 0} | wrong
        check_refused("a choice of", "ChooseRows", arrays, (np.int64,), **asked)
    cut = {**arrays, "q": arrays["q"][..., 1:].copy()}
    check_refused("queries", "ChooseRows", cut, (np.int64,), count=1, interleaved=0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_keys(interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    B, T, D, half = 2, 5, 10, 2
    given: dict[str, Any] = {
        "a": rng.standard_normal((B, T, D), np.float32) + np.float32(3),
        "weight": rng.standard_normal(D, np.float32),
        "bias": rng.standard_normal(D, np.float32),
        "cos": rng.standard_normal((B, T, half), np.float32),
        "sin": rng.standard_normal((B, T, half), np.float32),
    }
    how = {"epsilon": 1e-6, "interleaved": int(interleaved)}
    [got] = same_everywhere(monkeypatch, "IndexKeys", given, (np.float32,), **how)
    wanted = index_keys(*map(torch.from_numpy, given.values()), 1e-6, interleaved)
    np.testing.assert_allclose(got, wanted.numpy(), rtol=2e-5, atol=2e-5)
    alone = {name: x[1:, 2:3].copy() if x.ndim == 3 else x for name, x in given.items()}
    [one] = run("IndexKeys", alone, (np.float32,), 1, **how)
    np.testing.assert_array_equal(one, got[1:, 2:3])
    check_refused("", "IndexKeys", given | {"bias": given["bias"][1:]}, (np.float32,), **how)


def make_rows(
    rng: np.random.Generator, B: int, T: int, S: int, count: int
) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64]]:
    """Rows wider than a query's 20 numbers, and positions that were chosen among them."""
    given: dict[str, Any] = {
        "cache": rng.standard_normal((B, 1, S, 24), np.float32),
        "fresh": rng.standard_normal((B, 1, T, 24), np.float32),
        "base": rng.integers(S // 2, S, B),
        "first": np.zeros(B, np.int64),
    }
    chosen = np.full((B, T, count), -1)
    for b in range(B):
        for t in range(T):
            seen = int(given["base"][b]) + t + 1
            own = np.sort(rng.permutation(seen)[:count])
            chosen[b, t, : len(own)] = own
    return given, chosen


@pytest.mark.parametrize(
    ("B", "T", "S", "count"), [(2, 3, 40, 8), (1, 1, 1300, 700), (1, 20, 9, 30)]
)
def test_attention(B: int, T: int, S: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is attention over the chosen rows side by side, as if there were no others."""
    rng, H, C, latent = np.random.default_rng(S), 18, 20, 16
    rows, chosen = make_rows(rng, B, T, S, count)
    q = rng.standard_normal((B, H, T, C), np.float32)
    how = {"scale": 0.2, "groups": 1, "values": 0, "latent": latent, "written": 0}
    given = {"q": q, **rows, "chosen": chosen}
    [got] = same_everywhere(monkeypatch, "Attention", given, (np.float32,), **how)
    for b, t in np.ndindex(B, T):
        base = int(rows["base"][b])
        both = np.concatenate([rows["cache"][b, 0, :base], rows["fresh"][b, 0]])
        own = both[chosen[b, t][chosen[b, t] >= 0], :C]
        np.testing.assert_array_equal(got[b, :, t], exact.attention(q[b, :, t], own, 0.2, latent))
    tensors: list[Any] = [torch.from_numpy(each) for each in (q, *rows.values())]
    tensors += [0.2, latent, torch.from_numpy(chosen)]
    for wanted in (mla_attention(*tensors), mla_attention_inductor(*tensors)):
        np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-4, atol=1e-5)
    written = {**given, "cache": rows["cache"].copy()}
    for b in range(B):
        room = min(T, S - int(rows["base"][b]))
        at = int(rows["base"][b])
        written["cache"][b, :, at : at + room] = rows["fresh"][b, :, :room]
    if (rows["base"] + T <= S).all():
        [same] = run("Attention", written, (np.float32,), 2, **how | {"written": 1})
        np.testing.assert_array_equal(same, got)
    check_refused(
        "chosen rows", "Attention", given | {"chosen": chosen[:, :, :0]}, (np.float32,), **how
    )


def test_attention_to_all_rows_is_the_usual_one() -> None:
    rng = np.random.default_rng(1)
    rows, _ = make_rows(rng, 1, 4, 900, 1)
    chosen = np.full((1, 4, 910), -1)
    for t in range(4):
        seen = int(rows["base"][0]) + t + 1
        chosen[0, t, :seen] = np.arange(seen)
    q = rng.standard_normal((1, 3, 4, 24), np.float32)
    how = {"scale": 0.2, "groups": 1, "values": 0, "latent": 16, "written": 0}
    [dense] = run("Attention", {"q": q, **rows}, (np.float32,), 1, **how)
    [sparse] = run("Attention", {"q": q, **rows, "chosen": chosen}, (np.float32,), 1, **how)
    np.testing.assert_array_equal(sparse, dense)


def test_latent_attention_to_chosen_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    H, n, latent, half, v, B, T = 3, 6, 16, 2, 10, 2, 3
    rows, chosen = make_rows(rng, B, T, 30, 7)
    uk, uv = (
        pack_floats(torch.from_numpy(rng.standard_normal(shape).astype(np.float32))).numpy()
        for shape in ((H, n, latent), (H, latent, v))
    )
    angles = rng.standard_normal((2, B, T, half), np.float32)
    q = rng.standard_normal((B, T, H * (n + 2 * half)), np.float32)
    given: dict[str, Any] = {
        **{"q": q, "uk": uk, "uk_scales": None, "uv": uv, "uv_scales": None},
        **{"cos": angles[0], "sin": angles[1]},
        **rows,
        "chosen": chosen,
    }
    how = {"scale": 0.2, "groups": 1, "values": 0, "latent": latent, "written": 0, "N": v}
    how |= {"interleaved": 1}
    [got] = same_everywhere(monkeypatch, "LatentAttention", given, (np.float32,), **how)
    own = (torch.from_numpy(each) for each in (q, uk, uv, *angles, *rows.values()))
    query, keys, values, *others = own
    wanted = mla_packed(
        query, keys, None, values, None, *others, 0.2, latent, v, True, torch.from_numpy(chosen)
    )
    np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-4, atol=1e-4)
