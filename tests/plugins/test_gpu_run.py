"""`tools/gpu_run.sh`: what it walks through without a GPU, and what it never calls passed."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ["preflight", "random", "rtx", "provider", "soak"]
NAMES += ["kernels", "rooflines", "tiny", "slice", "v4", "nccl", "tensorrt"]
NO_GPU, ON_CPU = "skipped: no GPU", "on the CPU alone"

pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")


@pytest.mark.full
def test_smoke(tmp_path: Path) -> None:
    """Every command runs to its end; of what needs a GPU nothing is called passed."""
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = ["tools/gpu_run.sh", "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=hidden, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {
        name: json.loads((tmp_path / f"{number}-{name}.json").read_text())
        for number, name in enumerate(NAMES, 1)
    }
    assert "passed" not in done.stdout + json.dumps(found)
    assert {name: each["status"] for name, each in found.items()} == {
        **dict.fromkeys(NAMES, NO_GPU),
        **{"rooflines": ON_CPU, "slice": ON_CPU, "v4": ON_CPU},
        "rtx": found["rtx"]["rows"][0]["status"],  # its package is missing
    }
    rows = {name: [row["what"] for row in each["rows"]] for name, each in found.items()}
    statuses = {row["what"]: row["status"] for each in found.values() for row in each["rows"]}
    assert {"torch", "triton", "pytest-xdist", "g++"} < {*rows["preflight"]}
    assert statuses["one part is compiled and loaded"] == NO_GPU
    assert statuses["sums, captured"] == NO_GPU
    assert statuses["sums, over gloo"] == ON_CPU
    assert {"test_mla_attention", "test_the_driver_launches_the_ptx"} < {*rows["kernels"]}
    kinds = {what.rpartition(" B ")[0] or what.partition(" N ")[0] for what in rows["rooflines"]}
    assert kinds == {
        *("mla_attention", "accept_rewind", "accept_mixed", "kv_write", "moe", "moe fp8"),
        *("moe nvfp4", "matmul_scaled fp8", "matmul_scaled nvfp4"),
    }
    parts = [what.partition(" T ")[0] for what in rows["slice"]]
    assert parts[:4] == ["R1 dense layer", "R1 MoE layer", "R1 head", "R1 acceptance"]
    assert rows["slice"][-1] == "R1 slice nextn 2, eager"
    assert rows["v4"] == ["V4 slice nextn 2, eager"]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json"] * 12 + [".txt"] * 10


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location("gpu_run", ROOT / "benchmarks" / "gpu_run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_run", module)  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


def outcome(script: ModuleType, tmp_path: Path, code: str, limit: int = 60) -> dict[str, Any]:
    command = script.Command("own", ("-c", code, "ROWS"), None, script.checked, limit)
    found: dict[str, Any] = script.run(command, 1, tmp_path, smoke=False)
    return found


WRITE = """
import json, sys
def say(what, status):
    with open(sys.argv[1], "a") as file:
        print(json.dumps({"what": what, "status": status, "detail": ""}), file=file)
"""


def test_what_a_command_comes_to(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst of its rows; a crash, silence or a time limit is a failure with what was said."""
    right = 'say("a", "noted"); say("b", "passed")'
    for code, wanted, count in (
        (right, "passed", 2),
        (right + '; say("c", "on the CPU alone")', ON_CPU, 3),
        (right + '; say("c", "skipped: no GPU"); say("d", "on the CPU alone")', NO_GPU, 4),
        (right + '; say("c", "failed")', "failed", 3),
        (right + "; sys.exit(3)", "failed", 3),
        (right + "; import os; os.abort()", "failed", 3),
        ('say("a", "noted")', "failed", 1),
        ("", "failed", 0),
    ):
        found = outcome(script, tmp_path, WRITE + code)
        assert (found["status"], len(found["rows"])) == (wanted, count), code
    endless = WRITE + right + '\nprint("x", flush=True)\nwhile True: pass'
    found = outcome(script, tmp_path, endless, limit=1)
    assert found["status"] == "failed"
    assert found["rows"][-1]["detail"].startswith("cut short after 1 s: see ")
    assert (tmp_path / "1-own.txt").read_text() == "x\n"


def test_rows_of_figures(script: ModuleType, tmp_path: Path) -> None:
    """A row that was not timed has not run on a GPU; a wrong one has failed; so has a NaN."""
    row = {"kernel": "k", "shape": "s", "bound": 1.0, "beside": [], "limit": 0.1}
    given = [(0.01, 2.0), (0.01, None), (0.2, 2.0), (float("nan"), 2.0)]
    file = tmp_path / "rows"
    lines = [json.dumps(row | {"error": e, "microseconds": us}) for e, us in given]
    file.write_text("\n".join(lines))
    found = script.measured(file)
    assert [row["status"] for row in found] == ["passed", ON_CPU, "failed", "failed"]
    assert found[0]["detail"] == "error 1.0e-02, 2.0 us, 50% of the bound"


def test_rows_of_tests(script: ModuleType, tmp_path: Path) -> None:
    """A row per function: the worst of its cases, and why."""
    file = tmp_path / "junit.xml"
    file.write_text(
        """<testsuites><testsuite>
        <testcase name="test_a[1]"/>
        <testcase name="test_a[2]"><failure message="off by 3&#10;more"/></testcase>
        <testcase name="test_b"><skipped message="no CUDA device"/></testcase>
        <testcase name="test_c[fp8]"><skipped message="from sm_89 on"/></testcase>
        <testcase name="test_c[bf16]"/>
        <testcase name="test_d"/>
        <testcase name="test_f"><skipped message="target tensorrt needs tensorrt"/></testcase>
        <testcase name="test_e"><error message="no fixture"/></testcase>
        </testsuite></testsuites>"""
    )
    found = {row["what"]: (row["status"], row["detail"]) for row in script.tested(file)}
    assert found == {
        "test_a": ("failed", "1 passed, 1 failed: off by 3"),
        "test_b": (NO_GPU, "1 skipped: no GPU"),
        "test_c": ("skipped: from sm_89 on", "1 skipped: from sm_89 on, 1 passed"),
        "test_d": ("passed", "1 passed"),
        "test_e": ("failed", "1 failed: no fixture"),
        "test_f": (
            "skipped: target tensorrt needs tensorrt",
            "1 skipped: target tensorrt needs tensorrt",
        ),
    }
    assert script.tested(tmp_path / "none.xml") == []


def test_an_unknown_name() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_run.py"), "speed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"speed: expected any of {', '.join(NAMES)}\n"


@pytest.mark.parametrize(("status", "run"), [("failed", 1), ("passed", len(NAMES))])
def test_a_failed_preflight_ends_the_run(
    status: str, run: int, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answer(command: Any, *of: Any) -> dict[str, Any]:
        asked.append(command.name)
        found = status if command.name == "preflight" else "passed"
        return {"name": command.name, "status": found, "seconds": 0.0, "rows": []}

    monkeypatch.setattr(script, "run", answer)
    monkeypatch.setattr(sys, "argv", ["gpu_run.py", "--out", str(tmp_path)])
    ended = pytest.raises(SystemExit, match="1") if status == "failed" else contextlib.nullcontext()
    with ended:
        script.main()
    assert asked == NAMES[:run]
