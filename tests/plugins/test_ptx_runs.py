"""Oracle O8 on what a GPU would get: the kernels' PTX, executed, equals the PyTorch references.

`tests/support/ptx_machine` executes it, and `ptx_checks` has the cases.
"""

import json
from pathlib import Path

import pytest

from tests.support.compiling import run

pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
pytestmark = pytest.mark.xdist_group("ptx")

FEW = ("attention bfloat16", "product bfloat16 in nvfp4", "greedy acceptance")
FOUND = {
    "no barrier": "PtxError: ldmatrix",
    "nobody waits for copies": "AssertionError: Tensor-likes are not close",
    "no mask": "PtxError: ld.global",
    "another scale": "AssertionError: Tensor-likes are not close",
}


def said(cache: Path, form: str, *checks: str) -> dict[str, str]:
    """What came out of each check; of all if none is named. form: an architecture, or `plugin`."""
    given = ("-W", "ignore", "-m", "tests.support.ptx_checks", form, *checks)
    lines = map(json.loads, run(*given, cache=cache).splitlines())
    return {line["check"]: line["said"] for line in lines}


def test_kernels_compute_what_references_do(tmp_path: Path) -> None:
    assert said(tmp_path, "90", *FEW) == dict.fromkeys(FEW, "passed")


@pytest.mark.full
@pytest.mark.parametrize(("form", "count"), [("80", 41), ("90", 44), ("100", 44), ("plugin", 41)])
def test_all_of_them(form: str, count: int, tmp_path: Path) -> None:
    """Shapes of R1's rank of eight are among them, and fp8 caches where Triton converts them."""
    found = said(tmp_path, form)
    assert len(found) == count
    assert {name: told for name, told in found.items() if told != "passed"} == {}


@pytest.mark.full
def test_planted_mistakes_are_found(tmp_path: Path) -> None:
    found = said(tmp_path, "90", *FOUND)
    assert {name: told.startswith(FOUND[name]) for name, told in found.items()} == dict.fromkeys(
        FOUND, True
    ), found
