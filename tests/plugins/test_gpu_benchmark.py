"""`benchmarks/gpu.py --smoke`: the script that measures a GPU, without one."""

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


def test_smoke() -> None:
    done = run("--smoke")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    kernels = [line.split()[1] for line in rows]
    assert kernels == ["mla_attention"] * 2 + ["accept_rewind"] * 2 + ["moe"] * 2


@pytest.mark.full
def test_the_engine_and_eager_pytorch(tiny_engine: Callable[..., Path]) -> None:
    done = run("--smoke", "--only", "engine", "--engine", str(tiny_engine(3)))
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("│")]
    assert [(row[5], row[7]) for row in rows] == [("eager", "0.0e+00"), ("engine", "0.0e+00")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "needs a CUDA GPU; --smoke checks the kernels without one"),
        (("--smoke", "--only", "engine"), "nothing to build for: --only engine needs --engine"),
        (("--smoke", "--only", "rope"), "--only rope: expected any of attention, acceptance,"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
