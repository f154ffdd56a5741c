"""What the compiled kernels need of a GPU: thresholds on registers, spills, copies and programs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.compiling import run

pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
pytestmark = pytest.mark.xdist_group("ptx")

COMPILE = """
import json, sys
from dataclasses import asdict
from mtpbuild.plugins.resources import MODELS, cases, resources

model, architecture, wanted, kernels = sys.argv[1:]
for case, launch in cases(MODELS[model], int(architecture)):
    if case.startswith(wanted) and launch.kernel.__name__ in kernels.split(","):
        print(json.dumps(asdict(resources(case, launch, int(architecture)))))
"""
FULL = pytest.mark.full
NARROW = [("gate_and_up", f"experts {form}, 1 tokens") for form in ("fp8", "nvfp4")]
ALL = "mla_partial,mla_combine,scaled_product,gate_and_up,down"


def compiled(model: str, architecture: int, case: str, kernels: str, cache: Path) -> list[Any]:
    given = (model, str(architecture), case, kernels)
    lines = run("-W", "ignore", "-c", COMPILE, *given, cache=cache).splitlines()
    return [json.loads(line) for line in lines]


@FULL
def test_combination_of_splits_is_not_serial(tmp_path: Path) -> None:
    """Its programs at batch 1 fill an H100, and nothing is spilled."""
    (found,) = compiled("r1", 90, "attention bf16, 4", "mla_combine", tmp_path)
    assert found["spills"] == found["stack"] == 0
    assert found["programs"] >= 132
    assert found["steps"] > 0  # cuobjdump's listing was read: there is a loop over blocks of splits


@FULL
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_attention_copies_ahead_without_spills(architecture: int, tmp_path: Path) -> None:
    rows = compiled("r1", architecture, "attention", "mla_partial", tmp_path)
    assert {row["case"] for row in rows} >= {"attention bf16, 4 tokens", "attention fp32, 1 tokens"}
    for row in rows:
        assert row["spills"] == row["stack"] == 0, row
        assert row["copies"] > 0, row
        assert row["programs"] >= 132, row


@FULL
@pytest.mark.parametrize("architecture", [90, 100])
@pytest.mark.parametrize("case", ["product", "experts"])
def test_products_do_not_spill(case: str, architecture: int, tmp_path: Path) -> None:
    rows = compiled("r1", architecture, case, ALL, tmp_path)
    assert rows
    for row in rows:
        assert row["spills"] == 0, row
    # One token's gate and up have few programs with fp8 and nvfp4 (docs/plugins.md).
    wide = [row for row in rows if (row["kernel"], row["case"]) not in NARROW]
    assert wide
    assert min(row["programs"] for row in wide) >= 128


@FULL
@pytest.mark.parametrize("architecture", [80, 90])
def test_the_small_model_too(architecture: int, tmp_path: Path) -> None:
    rows = compiled("deepseek-tiny", architecture, "attention", "mla_partial", tmp_path)
    assert rows
    assert all(row["spills"] == 0 for row in rows)
