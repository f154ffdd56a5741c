"""Oracle O8 for attention to chosen rows: its Triton kernels, interpreted, equal the references.

Bugs are planted in the kernels' source: a check that misses one is no check.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support import sparse_kernels
from tests.support.sparse_kernels import Choice, Chosen, Compressed

triton = pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
if not triton.knobs.runtime.interpret:
    pytest.skip("a GPU runs these contracts in tests/gpu", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("bfloat16_products")

WIDE, NARROW = torch.float32, torch.bfloat16
CASES = {
    "a token that sees few rows": Choice(1, 1, 12, 1, 4),
    "windows": Choice(3, 4, 30, 4, 8, interleaved=True),
    "never as many as may be chosen": Choice(2, 2, 5, 6, 40),
    "several tiles": Choice(2, 3, 90, 5, 20, sizes=(3, 10, 4), scored=16, block=16),
    "ties": Choice(2, 4, 70, 4, 25, 2, scored=32, block=16),
    "ties in bf16": Choice(2, 2, 60, 2, 8, 2, dtype=NARROW, block=32),
    "bf16": Choice(2, 2, 60, 3, 9, None, True, NARROW),
    "many rows": Choice(2, 1, 700, 2, 530, 3),
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_choice(case: str) -> None:
    for seed in (0, 1):
        sparse_kernels.check_choice(replace(CASES[case], seed=seed), "cpu")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, which interprets
def test_what_is_no_number_is_chosen_last() -> None:
    sparse_kernels.check_nan("cpu")


COMPRESSED = {
    "all rows": Compressed(4, 4, 0),
    "rows in the last places of their tokens": Compressed(16, 8, 0, seed=1),
    "chosen rows": Compressed(8, 4, 3, seed=2),
    "more than there are": Compressed(4, 4, 20),
    "bf16": Compressed(4, 4, 2, heads=18, dtype=NARROW),
    "a draft, whose row is in no cache": Compressed(1, 1, 0, written=False, tokens=1),
}


@pytest.mark.full
@pytest.mark.parametrize("case", COMPRESSED)
def test_compressed_rows(case: str) -> None:
    sparse_kernels.check_compressed(COMPRESSED[case], "cpu")


def choose_in_all_cases() -> None:
    for case in CASES.values():
        sparse_kernels.check_choice(case, "cpu")
    sparse_kernels.check_nan("cpu")


SMALL = Chosen(2, 3, 2, 4, 16, 4, 60, 26, WIDE, 3, 1 << 20)
ATTENTION = {
    "fp32": SMALL,
    "all rows in one split": replace(SMALL, splits=1, fresh=2, count=70),
    "bf16": replace(SMALL, dtype=NARROW, heads=18, splits=None),
    "bf16 in 48 KB": replace(SMALL, dtype=NARROW, rank=130, rope=16, shared=48 << 10),
    "few rows": replace(SMALL, slots=1, tokens=1, capacity=9, count=40),
}


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_to_chosen_rows(case: str) -> None:
    sparse_kernels.check_chosen(ATTENTION[case], "cpu")


def test_an_idle_slot() -> None:
    sparse_kernels.check_idle("cpu")


def attend_in_all_cases() -> None:
    for case in ATTENTION.values():
        sparse_kernels.check_chosen(case, "cpu")


Plant = Callable[[str, str, str], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plant:
    """Put a changed copy of a kernel's module in its place."""

    def change(op: str, right: str, wrong: str) -> None:
        name = f"mtpbuild.plugins.{op}.triton"
        source = inspect.getsource(importlib.import_module(name))
        assert right in source
        kept = source.replace(right, wrong).partition("\n@by_kernels")[0]  # no second op
        (tmp_path / "changed.py").write_text(kept, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, tmp_path / "changed.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)

    return change


IN_A_CHOICE = {  # none of them lets a kernel write outside of its tensors
    "the newest committed row may not be chosen": (
        "tl.load(base + b).to(tl.int32)",
        "(tl.load(base + b).to(tl.int32) - 1)",
    ),
    "a row of the window sees a later one": ("(tl.int32) + t + 1", "(tl.int32) + t + 2"),
    "a token does not see itself": ("(tl.int32) + t + 1", "(tl.int32) + t"),
    "ties go to odd positions": ("ordered(score), j", "ordered(score) | (j & 1), j"),
    "the last of equal scores are chosen": (
        "rank = better_so",
        "place = seen - 1 - place\n            rank = better_so",
    ),
    "NaN is a number": ("0x7FFFFFFF), LEAST)", "0x7FFFFFFF), bits)"),
    "all tokens turn as the first": ("cos + n * (ROPE // 2)", "cos"),
    "scores may be negative": ("sums < 0,", "sums != sums,"),
    "keys lie in front": (" + (WIDTH - SIZE)", ""),
    "a border is missed": ("border = tl.where(z < COUNT, border, three)", "border = border"),
}


@pytest.mark.full
@pytest.mark.parametrize("bug", IN_A_CHOICE)
def test_bugs_in_a_choice_are_found(bug: str, plant: Plant) -> None:
    plant("sparse_rows", *IN_A_CHOICE[bug])
    with pytest.raises(AssertionError):
        choose_in_all_cases()


IN_ATTENTION = {
    "the first fresh row is read from the cache": ("(place < length, old", "(place <= length, old"),
    "tokens attend to the rows of the first": ("(b * TOKENS + token)", "(b * TOKENS)"),
    "the newest row is not seen": ("place <= newest)) |", "place < newest)) |"),
    "rows have the width of a query": ("new + (place - length) * WIDTH", "new + place - length"),
    "no row is row 0": ("(place >= 0) &", "(place >= -1) &"),
    "splits overlap": ("end = tl.where(filled, end, begin)", "end = tl.minimum(end + 1, total)"),
}


@pytest.mark.full
@pytest.mark.parametrize("bug", IN_ATTENTION)
def test_bugs_in_attention_are_found(bug: str, plant: Plant) -> None:
    plant("mla_attention", *IN_ATTENTION[bug])
    with pytest.raises(AssertionError):
        attend_in_all_cases()
