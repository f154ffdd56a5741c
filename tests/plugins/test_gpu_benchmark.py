"""`benchmarks/gpu.py --smoke`: the script that measures a GPU, without one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"

pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SCRIPT), *arguments]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=hidden, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_rows_as_they_come(tmp_path: Path) -> None:
    done = run("--smoke", "--only", "writes,acceptance", "--rows", str(tmp_path / "rows.jsonl"))
    assert done.returncode == 0, done.stderr
    as_they_came = [line.split(" | ") for line in done.stderr.splitlines()]
    assert as_they_came == rows(done.stdout)
    written = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert [(row["kernel"], row["shape"]) for row in written] == [(*r[:2],) for r in as_they_came]
    assert [cells[0] for cells in as_they_came] == ["kv_write", "accept_rewind", "accept_rewind"]


def rows(table: str) -> list[list[str]]:
    lines = (line for line in table.splitlines() if line.startswith("│"))
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


@pytest.mark.full
def test_the_slice_compiled() -> None:
    """Each part as target inductor lowers it, on the CPU."""
    done = run("--smoke", "--only", "slice", "--compiled")
    assert done.returncode == 0, done.stderr
    found = rows(done.stdout)
    assert [cells[1] for cells in found][-2:] == ["nextn 2, eager", "nextn 2, engine"]
    assert sum(float(cells[2]) > 0 for cells in found) > 5, "other code rounds otherwise"


@pytest.mark.full
def test_the_engine_and_eager_pytorch(tiny_engine: Callable[..., Path]) -> None:
    done = run("--smoke", "--only", "engine", "--engine", str(tiny_engine(3, max_batch=1)))
    assert done.returncode == 0, done.stderr
    found = [(cells[1], cells[2]) for cells in rows(done.stdout)]
    assert found == [("nextn 3, eager", "0.0e+00"), ("nextn 3, engine", "0.0e+00")]


ONE_AFTER_ANOTHER = """
import runpy, sys

for arguments in ([], ["--smoke", "--only", "engine"], ["--smoke", "--only", "rope"]):
    sys.argv[1:] = arguments
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        print(type(end.code).__name__, end.code)
"""


@pytest.mark.full
def test_bad_input_is_one_line() -> None:
    """One process asks for all of it: most of its time goes into importing torch."""
    start = f"import sys; sys.argv[0] = {str(SCRIPT)!r}; sys.path[0] = {str(SCRIPT.parent)!r}"
    command = [sys.executable, "-c", f"{start}\n{ONE_AFTER_ANOTHER}"]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    first, second, third = done.stdout.splitlines()  # a string makes the exit code 1
    assert first.startswith("str ")
    assert first.endswith("needs a CUDA GPU; --smoke checks the kernels without one")
    assert second.startswith("str ")
    assert second.endswith("builds no engine: --only engine needs --engine")
    assert third.startswith("str --only rope: expected any of attention, acceptance,")
