"""Caches in int8: rows are rounded once, and attention over them sums integers."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mtpbuild.plugins import grouped_attention_flat, mla_packed
from mtpbuild.plugins.cpu.layout import pack_floats
from mtpbuild.plugins.int8_rows import blocks_of, read_rows, round_rows
from tests.support import cpu_kernels, exact
from tests.support.cpu_kernels import SOURCE, check_refused, compiled, run, same_everywhere

F = np.float32
Given = dict[str, Any]


def rounded(rows: NDArray[Any], sections: list[int]) -> NDArray[np.int8]:
    held: NDArray[np.int8] = round_rows(torch.from_numpy(rows), sections).numpy()
    return held


def blocks(sections: list[int]) -> exact.Blocks:
    """Each block's first value, number of values, and the place of its scale."""
    sizes, found, at = blocks_of(sections), [], 0
    for i, size in enumerate(sizes):
        found.append((at, size, sum(sizes) + 2 * i))
        at += size
    return found


def place_rows(B: int, T: int, S: int, sections: list[int], written: bool, seed: int) -> Given:
    """Rows of a cache and fresh rows; some values are far larger than others."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((B, 1, S + T, sum(sections)), F)
    rows *= np.exp2(rng.integers(-6, 3, rows.shape[:3])).astype(F)[..., None]
    rows[..., 3] *= 9
    cache, base = rounded(rows[:, :, :S], sections), rng.integers(1, S - T, B)
    fresh = np.ascontiguousarray(rows[:, :, S:])
    if written:
        for b, at in enumerate(base):
            cache[b, :, at : at + T] = rounded(fresh[b], sections)
    return {"cache": cache, "fresh": fresh, "base": base, "first": np.zeros(B, np.int64)}


def wanted(
    q: NDArray[Any], given: Given, sections: list[int], keys: exact.Blocks, values: exact.Blocks
) -> NDArray[Any]:
    """Return what each token of q [B, H, T, C] says of the rows that it sees."""
    B, H, T, _ = q.shape
    y = np.empty((B, H, T, sum(count for _, count, _ in values)), F)
    for b in range(B):
        for t in range(T):
            old = given["cache"][b, 0, : given["base"][b]]
            rows = np.concatenate([old, rounded(given["fresh"][b, 0, : t + 1], sections)])
            y[b, :, t] = exact.integer_attention(q[b, :, t], rows, 0.3, keys, values)
    return y


LATENT = [
    (2, 3, 4, (64, 16), 200, False),
    (1, 20, 4, (48, 8), 700, True),
    (1, 5, 70, (32, 0), 90, False),
    (2, 1, 1, (40, 4), 1300, True),
]


@pytest.mark.parametrize(("B", "H", "T", "sections", "S", "written"), LATENT)
def test_latent_attention(
    B: int, H: int, T: int, sections: tuple[int, int], S: int, written: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    both, rng = [*sections], np.random.default_rng(S)
    given = place_rows(B, T, S, both, written, S)
    q = rng.standard_normal((B, H, T, sum(both)), F)
    how = {"groups": 1, "values": 0, "latent": both[0], "written": int(written)}
    [got] = same_everywhere(monkeypatch, "Attention", {"q": q} | given, (F,), scale=0.3, **how)
    found, count = blocks(both), len(blocks_of(both[:1]))
    np.testing.assert_array_equal(got, wanted(q, given, both, found, found[:count]))
    H, n, v = 2, 8, 12
    weights = [rng.standard_normal(shape, F) / 9 for shape in ((H, n, both[0]), (H, both[0], v))]
    packed = [pack_floats(torch.from_numpy(each)) for each in weights]
    angles = [rng.standard_normal((B, T, both[1] // 2), F) for _ in range(2)]
    x = rng.standard_normal((B, T, H * (n + both[1])), F)
    operands = {"q": x, "uk": packed[0].numpy(), "uks": None, "uv": packed[1].numpy(), "uvs": None}
    operands |= {"cos": angles[0], "sin": angles[1]} | given
    attributes = how | {"scale": 0.3, "N": v, "interleaved": 1}
    [y] = run("LatentAttention", operands, (F,), 2, **attributes)
    tensors = [a if a is None else torch.from_numpy(a) for a in operands.values()]
    near = mla_packed(*tensors, 0.3, both[0], v, True).numpy()
    assert np.abs(y - near).max() < 0.05 * np.abs(near).max()


@pytest.mark.parametrize(
    ("B", "H", "G", "T", "D", "S", "written"),
    [
        (2, 4, 2, 3, 32, 150, True),
        (1, 8, 2, 40, 40, 1100, False),
        (1, 3, 3, 1, 16, 70, True),
        (2, 8, 4, 1, 16, 2750, True),  # more splits than are attended at a time
    ],
)
def test_grouped_attention(
    B: int, H: int, G: int, T: int, D: int, S: int, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections, rng = 2 * G * [D], np.random.default_rng(S)
    given = place_rows(B, T, S, sections, written, S)
    q = rng.standard_normal((B, T, H * D), F)
    how = {"groups": G, "values": G * D, "latent": D, "written": int(written), "heads": H}
    [got] = same_everywhere(monkeypatch, "Attention", {"q": q} | given, (F,), scale=0.3, **how)
    found, each = blocks(sections), len(blocks_of([D]))
    apart = q.reshape(B, T, H, D).transpose(0, 2, 1, 3)
    for g in range(G):
        own = slice(g * H // G, (g + 1) * H // G)
        keys, values = (found[i * each : (i + 1) * each] for i in (g, G + g))
        one = wanted(apart[:, own], given, sections, keys, values)
        np.testing.assert_array_equal(got.reshape(B, T, H, D).transpose(0, 2, 1, 3)[:, own], one)
    tensors = [torch.from_numpy(a) for a in (q, *given.values())]
    near = grouped_attention_flat(*tensors, 0.3, H, G).numpy()
    assert np.abs(got - near).max() < 0.1 * np.abs(near).max()
    wrong = {"q": q} | given | {"cache": given["cache"][..., 1:].copy()}
    check_refused("int8 rows", "Attention", wrong, (F,), scale=0.3, **how)


def test_unseen_and_not_finite_rows() -> None:
    """A NaN reaches the queries that see its row; others don't notice."""
    sections = [64, 16]
    given = place_rows(1, 4, 100, sections, False, 3)
    given["base"] = np.array([90])
    q = np.random.default_rng(1).standard_normal((1, 5, 4, 80), F)
    how = {"groups": 1, "values": 0, "latent": 64, "written": 0, "scale": 0.3}
    [before] = run("Attention", {"q": q} | given, (F,), 1, **how)
    given["fresh"][0, 0, 2, 7] = np.inf
    given["cache"][0, 0, 90:] = -128
    [after] = run("Attention", {"q": q} | given, (F,), 1, **how)
    np.testing.assert_array_equal(before[:, :, :2], after[:, :, :2])
    assert np.isnan(after[:, :, 2:]).all()


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged cache gives the same result in every set; rows with a negative scale add 0."""
    rng = np.random.default_rng(seed)
    given = place_rows(1, 2, 300, [64, 16], True, seed)
    given["cache"] = rng.integers(-128, 128, given["cache"].shape, np.int8)
    scales = given["cache"][..., 80:].view(np.float16)
    scales[~(np.abs(scales) < 100)] = -0.5
    q = rng.standard_normal((1, 5, 2, 80), F)
    how = {"groups": 1, "values": 0, "latent": 64, "written": 1, "scale": 0.3}
    [got] = same_everywhere(monkeypatch, "Attention", {"q": q} | given, (F,), **how)
    assert np.isfinite(got).all()
    scales[:] = -np.abs(scales)
    [none] = same_everywhere(monkeypatch, "Attention", {"q": q} | given, (F,), **how)
    assert not none.any()


def test_sizes_are_checked_before_sections_are_made() -> None:
    given = place_rows(1, 2, 90, [64, 16], True, 0)
    q = np.zeros((1, 2, 80), F)
    how = {"groups": 1, "values": 8, "latent": 8, "written": 1, "heads": 1, "scale": 0.3}
    check_refused("keys and values of other", "Attention", {"q": q} | given, (F,), **how)


@pytest.mark.full
def test_work_for_many_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For 40 threads tasks have fewer queries, or fewer splits of rows: the bits are the same."""
    sources = Path(shutil.copytree(SOURCE, tmp_path / "source"))
    text, learnt = (sources / "ort.h").read_text(), "most_threads{1}"
    assert text.count(learnt) == 1
    (sources / "ort.h").write_text(text.replace(learnt, "most_threads{40}"))
    libraries = cpu_kernels.LIBRARY, compiled(sources, tmp_path / "many.so")
    how = {"groups": 1, "values": 0, "latent": 32, "written": 1, "scale": 0.3}
    for B, H, T, S in ((1, 20, 1, 90), (2, 40, 4, 700), (3, 5, 1, 2750), (20, 3, 2, 1100)):
        given = place_rows(B, T, S, [32, 8], True, S)
        given["q"] = np.random.default_rng(B).standard_normal((B, H, T, 40), F)
        floats = read_rows(torch.from_numpy(given["cache"]), [32, 8]).numpy()
        for cache in (given["cache"], floats):
            found = []
            for library in libraries:
                monkeypatch.setattr(cpu_kernels, "LIBRARY", library)
                names = ("q", "cache", "fresh", "base", "first")
                operands = {name: (given | {"cache": cache})[name] for name in names}
                found += run("Attention", operands, (F,), 2, **how)
            np.testing.assert_array_equal(found[0], found[1])
