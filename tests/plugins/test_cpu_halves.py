"""Caches in bfloat16: rows are rounded once, and read as what they were rounded to."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.cpu_kernels import check_refused, run, same_everywhere

F = np.float32
Given = dict[str, Any]


def halved(x: NDArray[Any]) -> NDArray[np.float32]:
    """Round to bfloat16, as PyTorch does."""
    rounded: NDArray[np.float32] = torch.from_numpy(x).bfloat16().float().numpy()
    return rounded


@pytest.mark.parametrize(
    ("B", "H", "T", "C", "S", "written"),
    [(2, 3, 4, 40, 200, 0), (1, 4, 1, 64, 1300, 1), (1, 2, 70, 24, 90, 0)],
)
def test_attention(
    B: int, H: int, T: int, C: int, S: int, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It equals the one over fp32 rows that bfloat16 holds, to the bit."""
    rng = np.random.default_rng(S)
    given: Given = {
        "q": rng.standard_normal((B, H, T, C), F),
        "cache": halved(rng.standard_normal((B, 1, S, C), F)),
        "fresh": halved(rng.standard_normal((B, 1, T, C), F)),
        "base": rng.integers(1, S - T, B),
        "first": np.zeros(B, np.int64),
    }
    how = {"scale": 0.3, "groups": 1, "values": 0, "latent": 16, "written": written}
    halves = given | {"cache": torch.from_numpy(given["cache"]).bfloat16()}
    [got] = same_everywhere(monkeypatch, "Attention", halves, (F,), **how)
    [wanted] = run("Attention", given, (F,), 1, **how)
    np.testing.assert_array_equal(got, wanted)
    for kind in (np.int32, np.float16):
        other = given | {"cache": given["cache"].astype(kind)}
        check_refused("a cache of another type", "Attention", other, (F,), **how)
