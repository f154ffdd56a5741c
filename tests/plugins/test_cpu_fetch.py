"""Weights that are not in memory: the library asks for chosen experts before it reads them."""

import mmap
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.cpu_kernels import TYPES, make_model, make_node, open_session
from tests.support.cpu_weights import FLOATS, draw_experts

E, INNER, X = 128, 1024, 8  # an expert has 1.5 MB, 384 pages


def map_unread(path: Path, array: NDArray[Any]) -> NDArray[Any]:
    """Return the array in a file of which no page is in memory; a fault reads one page."""
    with path.open("wb") as file:
        array.tofile(file)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = np.memmap(path, array.dtype, "r", shape=array.shape)
    memory: Any = mapped.base
    memory.madvise(mmap.MADV_RANDOM)
    return mapped


def count_waits() -> int:
    """Return how often this process waited for a disk."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are not asked")
def test_the_chosen_experts_are_asked_for(tmp_path: Path) -> None:
    """The first call waits for each page, and later ones for hardly any; their sums are equal."""
    rng = np.random.default_rng(0)
    drawn, _ = draw_experts(rng, FLOATS, X, E, INNER)
    held = {name: array for name, array in drawn.items() if array is not None}
    mapped = {name: map_unread(tmp_path / name, array) for name, array in held.items()}
    call = {"x": rng.standard_normal((1, E), np.float32), "weights": np.ones((1, 2), np.float32)}
    call["ids"] = np.zeros((1, 2), np.int32)
    names = ["x", "weights", "ids", "both", "", "down"]
    nodes = [make_node("Experts", names, ["y"])]
    session = open_session(make_model(nodes, call | held, {"y": TYPES[np.float32]}), threads=1)

    def run(ids: list[int], weights: dict[str, Any]) -> tuple[NDArray[Any], int]:
        before = count_waits()
        (y,) = session.run(None, call | {"ids": np.array([ids], np.int32)} | weights)
        return np.asarray(y), count_waits() - before

    for _ in range(300):  # whatever this process waited for before is long ago
        run([0, 1], held)
    _, first = run([0, 1], mapped)
    if not first:
        pytest.skip("files of this folder never leave memory")
    got, later = run([5, 7], mapped)
    assert first > 500
    assert later < 50
    np.testing.assert_array_equal(got, run([5, 7], held)[0])
