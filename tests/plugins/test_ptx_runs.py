"""Oracle O8 on what a GPU would get: the kernels' PTX, executed, equals the PyTorch references.

`tests/support/ptx_machine` executes it, and `ptx_checks` has the cases.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.compiling import run
from tests.support.ptx_machine import Traffic
from tests.support.ptx_traffic import ALLOWED

pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
pytestmark = pytest.mark.xdist_group("ptx")

FEW = ("attention bfloat16", "product bfloat16 in nvfp4", "greedy acceptance")
FOUND = {
    "no barrier": "PtxError: ldmatrix",
    "nobody waits for copies": "AssertionError: Tensor-likes are not close",
    "no mask": "PtxError: ld.global",
    "no mask of copies": "PtxError: cp.async",
    "another scale": "AssertionError: Tensor-likes are not close",
}


def run_checks(cache: Path, form: str, *checks: str) -> dict[str, str]:
    """Return the outcome of each check; of all if none is named. form: `plugin`, or a GPU's."""
    given = ("-W", "ignore", "-m", "tests.support.ptx_checks", form, *checks)
    lines = map(json.loads, run(*given, cache=cache).splitlines())
    return {line["check"]: line["said"] for line in lines}


@pytest.mark.full
def test_kernels_compute_what_references_do(tmp_path: Path) -> None:
    assert run_checks(tmp_path, "90", *FEW) == dict.fromkeys(FEW, "passed")


@pytest.mark.full
@pytest.mark.parametrize(("form", "count"), [("80", 52), ("90", 52), ("100", 52), ("plugin", 52)])
def test_all_of_them(form: str, count: int, tmp_path: Path) -> None:
    """Shapes of R1's rank of eight are among them."""
    found = run_checks(tmp_path, form)
    assert len(found) == count
    assert {name: told for name, told in found.items() if told != "passed"} == {}


@pytest.mark.full
def test_planted_mistakes_are_found(tmp_path: Path) -> None:
    found = run_checks(tmp_path, "90", *FOUND)
    assert {name: told.startswith(FOUND[name]) for name, told in found.items()} == dict.fromkeys(
        FOUND, True
    ), found


def test_wavefronts_of_shared_memory() -> None:
    """Patterns of 32 threads whose bank conflicts are known."""
    lanes = np.arange(32)
    patterns = {
        "words": (lanes * 4, 4, 1),
        "one word": (lanes * 0, 4, 1),
        "every second word": (lanes * 8, 4, 2),
        "a column of a row of 32": (lanes * 128, 4, 32),
        "16 bytes each": (lanes * 16, 16, 4),
        "16 bytes each, apart": (lanes * 128, 16, 32),
        "8 bytes each": (lanes * 8, 8, 2),
    }
    for name, (offsets, width, wavefronts) in patterns.items():
        traffic = Traffic()
        traffic.add(lanes, offsets, width)
        assert traffic.wavefronts == wavefronts, name


@pytest.mark.full
def test_products_leave_a_b200_its_bandwidth(tmp_path: Path) -> None:
    given = ("-W", "ignore", "-m", "tests.support.ptx_traffic", "100", "product nvfp4")
    *_, row = run(*given, cache=tmp_path).splitlines()
    assert row.startswith("| product nvfp4 | scaled_product | sm_100 |")
    assert 0 < float(row.split("|")[4]) <= 1024 * ALLOWED[100]
