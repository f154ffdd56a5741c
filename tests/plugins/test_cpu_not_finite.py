"""NaN and infinity in each operand of the CPU's operators: they reach what the operator gives.

Rows and slots that don't read the number keep their bits, and all instruction sets agree.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mtpbuild.plugins.cpu.layout import pack_scales, pack_values
from tests.support.cpu_kernels import Results, run
from tests.support.cpu_weights import random_weight
from tests.support.isas import isas

F, INT = np.float32, np.int64
Given = Mapping[str, Any]
Index = tuple[int, ...]
Place = Callable[[Index], Any]  # the part of each result that may change, by the damaged index
B, T, K, N = 2, 3, 64, 64
NUMBERS = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


@dataclass
class Op:
    """An operator's call. rows: which part of the results a number of an operand may change."""

    name: str
    given: Given
    rows: Mapping[str, Place]
    how: dict[str, Any] = field(default_factory=dict)
    results: tuple[type, ...] = (F,)
    saturates: tuple[str, ...] = ()  # operands of which an infinite number has a finite result

    def run(self, given: Given, patch: pytest.MonkeyPatch) -> Results:
        found: list[Results] = []
        for isa in isas():
            patch.setenv("MTPBUILD_CPU_ISA", isa)
            found.append(run(self.name, given, self.results, 1, **self.how))
        for other in found[1:]:
            for one, each in zip(found[0], other, strict=True):
                np.testing.assert_array_equal(one, each)  # NaN equals NaN
        return found[0]


def floats(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed + len(shape)).standard_normal(shape, F)


def weight(seed: int, *shape: int) -> tuple[NDArray[Any], NDArray[Any]]:
    values, scales, _ = random_weight(np.random.default_rng(seed), shape, 8)
    return pack_values(values).numpy(), pack_scales(scales).numpy()


def everything(at: Index) -> Any:
    return np.s_[:]


def token(at: Index) -> Any:
    return np.s_[at[0], at[1]]


def slot(at: Index) -> Any:
    return np.s_[at[0]]


def later(at: Index) -> Any:
    """Return the token's place [B, H, T, ..] and those after it."""
    return np.s_[at[0], :, at[2] :]


def after(at: Index) -> Any:
    return np.s_[at[0], at[1] :]


def attention(heads: int) -> Op:
    given: dict[str, Any] = {"q": floats(B, heads, T, 8), "cache": floats(B, 1, 150, 8, seed=1)}
    given |= {"fresh": floats(B, 1, T, 8, seed=2), "base": np.array([130, 70])}
    given |= {"first": np.zeros(B, INT)}
    rows: dict[str, Place] = {"q": lambda i: np.s_[i[0], i[1], i[2]], "fresh": later}
    rows["cache"] = lambda i: np.s_[i[0]] if i[2] < given["base"][i[0]] else np.s_[:0]
    how = {"scale": 0.3, "groups": 1, "values": 0, "latent": 6, "written": 0}
    return Op("Attention", given, rows, how)


def delta(advance: bool) -> Op:
    given: dict[str, Any] = {"mixed": floats(B, T, 2 * 8 + 2 * 64), "ba": floats(B, T, 4)}
    given |= {"rate": np.abs(floats(2)), "bias": floats(2, seed=3)}
    given |= {"state": floats(B, 2, 8, 64)}
    rows: dict[str, Place] = {"mixed": after, "ba": after, "state": slot}
    if not advance:
        return Op("DeltaRule", given, rows, {"keeps": 0}, saturates=("ba", "rate", "bias"))
    rows |= {"mixed": slot, "ba": slot}
    given["n"] = np.full(B, T)
    return Op("DeltaAdvance", given, rows, saturates=("ba", "rate", "bias"))


def calls() -> dict[str, Op]:
    x = floats(B, T, K)
    values, scales = weight(0, N, K)
    both, both_scales = weight(1, 4, 2 * K, K)
    down, down_scales = weight(2, 4, K, K)
    ids = np.random.default_rng(0).integers(0, 4, (B, T, 2)).astype(np.int32)
    shares = np.abs(floats(B, T, 2))
    around: dict[str, Any] = {"norm": floats(K), "sum": floats(B, T, N)}
    panels = floats(4, 4, K, 32), floats(4, 2, K, 32)
    halves = floats(B, T, 2), floats(B, T, 2, seed=5)
    token_rows: dict[str, Place] = {"x": token, "w": token}
    ops = [
        Op("Product", {"x": x, "v": values, "s": scales} | around, token_rows, {"N": N}),
        Op("GatedProduct", {"x": x, "v": values, "s": scales}, token_rows, {"N": N}),
        Op("Product", {"x": x, "v": floats(2, K, 32), "s": None} | around, token_rows, {"N": N}),
        Op("GatedProduct", {"x": x, "v": floats(2, K, 32)}, token_rows, {"N": N}),
        Op(
            "Experts",
            {"x": x, "w": shares, "i": ids, "b": both, "bs": both_scales}
            | {"d": down, "ds": down_scales, "sum": floats(B, T, K)},
            token_rows | {"sum": token},
        ),
        Op(
            "Experts",
            {"x": x, "w": shares, "i": ids, "b": panels[0], "bs": None}
            | {"d": panels[1], "ds": None, "sum": x + 1},
            token_rows | {"sum": token},
        ),
        Op("Norm", {"x": x, "weight": floats(K)}, token_rows, {"epsilon": 1e-6}),
        Op(
            "NormSum",
            {"x": x, "y": floats(B, T, K, seed=4), "weight": floats(K), "factor": floats(1)},
            {"x": token, "y": token},
            {"epsilon": 1e-6},
        ),
        Op("SoftCap", {"x": x}, token_rows, {"cap": 30.0}, saturates=("x",)),
        Op("Gate", {"x": x, "z": floats(B, T, K, seed=4)}, {"x": token, "z": token}, {"silu": 1}),
        Op("Gate", {"x": x, "z": floats(B, T, K, seed=4)}, {"x": token, "z": token}, {"gelu": 1}),
        Op(
            "Gate",
            {"x": x, "z": floats(B, T, K, seed=4)},
            {"x": token, "z": token},
            {"silu": 0},
            saturates=("z",),
        ),
        attention(1),
        attention(16),
        attention(20),
        Op(
            "Route",
            {"x": floats(B, T, 16), "bias": floats(16)},
            token_rows,
            {"groups": 4, "kept": 2, "experts": 4, "always": 1, "normalise": 1, "factor": 1.0},
            (F, np.int32),
            saturates=("x", "bias"),
        ),
        Op(
            "SoftmaxRoute",
            {"x": floats(B, T, 4), "scales": floats(4)},
            token_rows,
            {"experts": 4},
            (F, np.int32),
            saturates=("x",),
        ),
        Op(
            "Weigh",
            {"x": floats(B, T, 4 * 8), "w": shares, "i": ids},
            token_rows,
            {"experts": 4, "always": 0},
        ),
        Op("LogSoftmax", {"x": floats(B, T, 700)}, token_rows, saturates=("x",)),
        Op("Sum", {"x": floats(B, T, 37)}, token_rows),
        Op(
            "Accept",
            {"x": floats(B, T, 700), "window": np.zeros((B, T), INT), "d": np.full(B, T - 1)}
            | {"l": np.ones(B, INT), "active": np.ones(B, bool)},
            {"x": slot},
            results=(INT, INT, INT, F, F),
            saturates=("x",),
        ),
        Op(
            "CausalConv",
            {"x": floats(B, T, 20), "tail": floats(B, 3, 20), "weight": floats(4, 20)},
            {"x": after, "tail": slot},
        ),
        delta(advance=False),
        delta(advance=True),
        Op(
            "LatentRows",
            {"x": floats(B, T, 16 + 8 + 4), "q_weight": floats(16), "weight": floats(8)}
            | {"cos": halves[0], "sin": halves[1]},
            {"x": slot},
            {"epsilon": 1e-6, "interleaved": 1},
            (F, F),
        ),
        Op(
            "GroupedRows",
            {"x": floats(B, T, 4 * 8), "q_norm": floats(8), "k_norm": floats(8)}
            | {"cos": halves[0], "sin": halves[1]},
            {"x": slot},
            {"heads": 2, "groups": 1, "width": 8, "epsilon": 1e-6, "plus_one": 0},
            (F, F),
        ),
        Op(
            "MixStreams",
            {"x": floats(B, T, 4 * 20), "fn": floats(4 * 20, 24), "base": floats(24)}
            | {"scale": floats(3), "norm": floats(20), "branch": floats(B, T, 20)}
            | {"weights": floats(B, T, 20)},
            {"x": token, "branch": token, "weights": token},
            {"iterations": 2, "eps": 1e-6, "epsilon": 1e-6},
            (F, F, F),
            saturates=("fn", "base", "scale"),
        ),
        Op(
            "CompressedRows",
            {
                "a": floats(B, T, 24),
                "compressed": floats(B, 1, 12, 3),
                "opened": floats(B, 1, 12, 24),
            }
            | {"start": np.full(B, 3), "bias": floats(3, 12), "norm": floats(4), "keys": floats(2)}
            | {"cos": floats(B, 1, 1), "sin": floats(B, 1, 1)},
            dict.fromkeys(("a", "compressed", "opened", "cos", "sin"), slot),
            {"group": 2, "epsilon": 1e-6},
            (F, F),
            saturates=("bias",),
        ),
        Op(
            "IndexKeys",
            {"x": x, "weight": floats(K), "bias": floats(K), "cos": halves[0], "sin": halves[1]},
            token_rows,
            {"epsilon": 1e-6, "interleaved": 0},
        ),
        Op(
            "Embedding",
            {"ids": np.arange(6).reshape(B, T), "table": floats(6, K)},
            {"table": lambda i: np.s_[i[0] // T, i[0] % T]},
        ),
        Op(
            "Places",
            {"start": np.arange(B), "active": np.ones(B, bool), "x": np.abs(floats(4))}
            | {"tokens": np.array(T), "end": np.array(9)},
            {},
            {"offset": 1, "scale": 1.0},
            (F, F, INT, INT, INT),
        ),
    ]
    return {f"{op.name}{i}": op for i, op in enumerate(ops)}


CALLS = calls()


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("call", CALLS)
def test_they_reach_the_result(call: str, number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = CALLS[call]
    good = op.run(op.given, monkeypatch)
    for name, array in op.given.items():
        if array is None or array.dtype not in (np.float32, np.float16):
            continue
        places = [tuple(0 for _ in array.shape), tuple(size - 1 for size in array.shape)]
        for at in [*places, tuple(size // 2 for size in array.shape)]:
            damaged = array.copy()
            damaged[at] = NUMBERS[number]
            found = op.run({**op.given, name: damaged}, monkeypatch)
            place = op.rows.get(name, everything)(at)
            seen = op.name != "Attention" or good[0][place].size > 0
            finite = all(np.isfinite(each).all() for each in found if each.dtype == F)
            assert not (finite and seen and name in reaching(op, number, at)), (name, at)
            for one, each in zip(good, found, strict=True):
                one, each = one.copy(), each.copy()
                one[place] = each[place] = 0
                assert one.tobytes() == each.tobytes(), (name, at)


def reaching(op: Op, number: str, at: Index) -> set[str]:
    """Return operands of which such a number must be seen: not what the operator does not read."""
    names = set(op.given)
    if op.name == "Experts":
        names -= {"b", "bs", "d", "ds"} if at[0] not in op.given["i"] else set()
    if op.name == "DeltaAdvance" and at[-1] < 8:  # a query
        names -= {"mixed"}
    return names - set(op.saturates) if number != "nan" else names


@pytest.mark.parametrize("seen", [1, 40, 64, 65, 600])
@pytest.mark.parametrize("number", NUMBERS)
def test_scores(seen: int, number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No query sees the mean of all values where a score is NaN or infinite, of either sign."""
    op = attention(3)
    given = {**op.given, "cache": floats(B, 1, 700, 8), "base": np.array([seen - 1, 9])}
    given["q"] = np.abs(given["q"])
    given["cache"][0, 0, :, 7], given["fresh"][0, 0, :, 7] = 1.0, 1.0
    given["q"][0, 1, 0, 7] = NUMBERS[number]  # all scores of one query
    [y] = op.run(given, monkeypatch)
    assert np.isnan(y[0, 1, 0]).all()
    y[0, 1, 0] = 0
    assert np.isfinite(y).all()


@pytest.mark.parametrize("size", [2, 16, 33, 511, 512, 513, 1500])
def test_the_highest_logit(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is NumPy's and PyTorch's: the first NaN, if there is one."""
    x = floats(40, size)
    rng = np.random.default_rng(size)
    for row, bad in enumerate(product((np.nan, np.inf, -np.inf), (1, 2, size))):
        x[row, rng.integers(0, size, bad[1])] = bad[0]
    x[-1], x[-2], x[-3, : size // 2] = -np.inf, np.nan, np.nan
    op = Op("ArgMax", {"x": x}, {}, results=(INT,))
    [ids] = op.run(op.given, monkeypatch)
    np.testing.assert_array_equal(ids, x.argmax(-1))
    given: dict[str, Any] = {
        "x": x[:, None],
        "window": np.zeros((40, 1), INT),
        "d": np.zeros(40, INT),
    }
    given |= {"l": np.ones(40, INT), "active": np.ones(40, bool)}
    op = Op("Accept", given, {}, results=(INT, INT, INT, F, F))
    tokens, _, _, logprobs, _ = op.run(given, monkeypatch)
    np.testing.assert_array_equal(tokens[:, 0], ids)
    finite = np.isfinite(x.max(-1))  # -inf among others is a token that is forbidden
    np.testing.assert_array_equal(np.isfinite(logprobs[:, 0]), finite)


def test_rows_beyond_what_a_query_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands there, a cache's rows from base on and later tokens' rows change nothing."""
    for heads in (1, 16):
        op = attention(heads)
        [good] = op.run(op.given, monkeypatch)
        cache, fresh = op.given["cache"].copy(), op.given["fresh"].copy()
        for b, base in enumerate(op.given["base"]):
            cache[b, :, base:] = np.nan
        fresh[:, :, 2:] = np.nan
        [found] = op.run({**op.given, "cache": cache, "fresh": fresh}, monkeypatch)
        assert found[:, :, :2].tobytes() == good[:, :, :2].tobytes()
        assert np.isnan(found[:, :, 2:]).all()
