"""What the compiled kernels need of a GPU: thresholds on registers, spills, copies and programs."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.compiling import run

pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
pytestmark = pytest.mark.xdist_group("ptx")

COMPILE = """
import json, sys
from dataclasses import asdict
from tests.support.kernel_resources import MODELS, cases, resources

model, architecture, wanted, kernels = sys.argv[1:]
for case, launch in cases(MODELS[model], int(architecture)):
    if case.startswith(wanted) and launch.kernel.__name__ in kernels.split(","):
        print(json.dumps(asdict(resources(case, launch, int(architecture)))))
"""
FULL = pytest.mark.full
ROOT = Path(__file__).parents[2]
ALL = "mla_partial,mla_combine,scaled_product,gate_and_up,down"
# Instructions per byte of weights. An H100 could read at 80 % of its bandwidth with 0.346, a B200
# with 0.171.
LIMITS = {"fp8": 0.12, "nvfp4": 0.28, "plain": 0.05}
OF_SM_100 = {"fp8": 0.1, "nvfp4": 0.171, "plain": 0.05}  # which converts codes itself


def compiled(model: str, architecture: int, case: str, kernels: str, cache: Path) -> list[Any]:
    given = (model, str(architecture), case, kernels)
    lines = run("-W", "ignore", "-c", COMPILE, *given, cache=cache).splitlines()
    return [json.loads(line) for line in lines]


@FULL
def test_combination_of_splits_is_not_serial(tmp_path: Path) -> None:
    """At batch 1 there are programs enough for an H100, and nothing is spilled."""
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
        assert row["programs"] >= 128, row  # nearly as many as an H100 has SMs


@FULL
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_what_chooses_rows_and_reads_them_spills_nothing(architecture: int, tmp_path: Path) -> None:
    """Rows anywhere are copied ahead, 16 bytes at a time; 48 KB are enough for a choice."""
    kernels = ["score_rows", "best_rows", "mla_partial", "mla_combine"]
    rows = compiled("r1", architecture, "chosen", ",".join(kernels), tmp_path)
    assert [row["kernel"] for row in rows] == kernels * 2, "in bf16 and in fp32"
    for row in rows:
        assert row["spills"] == row["stack"] == 0, row
    scores, best, narrow, _, wide_scores, wide_best, wide, _ = rows
    for row in (scores, best, wide_scores, wide_best):
        assert row["shared"] <= 48 << 10, row
    for row in (narrow, wide):
        assert row["copies"] > 0, row
        assert row["programs"] >= 128, row
    assert {scores["product"], wide_scores["product"]} == {"HMMA"}
    assert 0 < narrow["per_byte"] <= 0.13, "a row's numbers are copied 16 bytes at a time"


@FULL
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_what_sums_parts_spills_nothing(architecture: int, tmp_path: Path) -> None:
    """Rows sum 14 parts of a product, queries 3."""
    rows = compiled("r1", architecture, "", "latent_row,absorbed_query,value_of_head", tmp_path)
    assert len(rows) == 5
    for row in rows:
        assert row["spills"] == row["stack"] == 0, row
        assert row["registers"] <= 128, row


# Loads and stores of the stack in an iteration, of 519 instructions: one register is too many.
OF_SM_80 = {"experts nvfp4, 64 tokens": 2}


@FULL
@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("case", ["product", "experts", "head"])
def test_products_by_bytes(case: str, architecture: int, tmp_path: Path) -> None:
    """They copy ahead, spill nothing, fill an H100 with one token, take few instructions."""
    limits = OF_SM_100 if architecture == 100 else LIMITS
    rows = compiled("r1", architecture, case, ALL, tmp_path)
    assert rows
    for row in rows:
        form = next((form for form in ("nvfp4", "fp8") if form in row["case"]), "plain")
        spills = OF_SM_80.get(row["case"], 0) if architecture == 80 else 0
        assert row["spills"] <= spills, row
        some = spills or "256 tokens" in row["case"]  # of the latter not in a loop
        assert row["stack"] <= (8 if some else 0), row
        assert row["programs"] >= 132, row
        assert row["shared"] <= 48 << 10, row  # as an AOT plugin has it
        assert row["per_byte"] <= limits[form], row  # 0: the loop was unrolled
    streaming = [row for row in rows if row["per_byte"]]
    assert streaming
    assert all(row["copies"] > 0 for row in streaming)
    assert all(row["per_byte"] for row in rows if "fp" in row["case"])


@pytest.mark.full
def test_fp8_products_by_bytes(tmp_path: Path) -> None:
    """One of them, compiled with every change."""
    (row,) = compiled("r1", 90, "product fp8", "scaled_product", tmp_path)
    assert 0 < row["per_byte"] <= LIMITS["fp8"]
    assert row["copies"] > 0
    assert row["spills"] == 0


# Other versions of Triton, by sm_90, sm_100, and sm_100 with the newer ptxas: an nvfp4 product's
# instructions per byte.
OTHERS = {"3.6.0": (0.33, 0.33, 0.23), "3.7.1": (0.33, 0.33, 0.21)}


@FULL
@pytest.mark.parametrize("version", OTHERS)
def test_other_versions_of_triton(version: str, tmp_path: Path) -> None:
    """A newer ptxas makes up for most of what an older Triton lacks on sm_100."""
    folder = ROOT / ".triton"
    if not (folder / version).exists():
        pytest.skip("other versions of Triton are not here: tools/triton_versions.sh")
    ptxas = str(folder / "nvcc" / "nvidia" / "cu13" / "bin" / "ptxas")
    newer = {"TRITON_PTXAS_BLACKWELL_PATH": ptxas}
    runs: list[tuple[int, dict[str, str]]] = [(90, {}), (100, {}), (100, newer)]
    for i, (architecture, others) in enumerate(runs):
        given = ("r1", str(architecture), "product nvfp4", "scaled_product")
        path = os.pathsep.join((str(folder / version), str(ROOT)))
        lines = run("-c", COMPILE, *given, cache=tmp_path / str(i), PYTHONPATH=path, **others)
        (row,) = map(json.loads, lines.splitlines())
        assert row["spills"] == row["stack"] == 0, row
        assert row["copies"] > 0, row
        assert 0 < row["per_byte"] <= OTHERS[version][i], row


@FULL
@pytest.mark.parametrize("architecture", [80, 90])
def test_the_small_model_too(architecture: int, tmp_path: Path) -> None:
    rows = compiled("deepseek-tiny", architecture, "attention", "mla_partial", tmp_path)
    assert rows
    assert all(row["spills"] == 0 for row in rows)


CONVERTS = """
import json
from tests.support.kernel_launches import empty, nvfp4
from tests.support.specialised import compile_specialised
from mtpbuild.plugins.matmul_scaled.triton import product_launch
from mtpbuild.plugins.ptx import compile_launch
import torch

launch = product_launch(empty(4, 512, dtype=torch.bfloat16), *nvfp4(512, 256))
own, older = (compile_specialised(launch, gpu).asm["ptx"] for gpu in (100, 90))
plugin = compile_launch(launch, 100).text
print(json.dumps(["e2m1x2" in text for text in (own, plugin, older)]))
"""


@FULL
def test_codes_are_converted_where_a_gpu_can(tmp_path: Path) -> None:
    """A plugin's PTX is older than the instruction, also on a GPU that has it."""
    found = run("-W", "ignore", "-c", CONVERTS, cache=tmp_path)
    assert json.loads(found) == [True, False, False]
