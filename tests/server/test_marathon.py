"""The short form of `benchmarks/marathon.py`: rude clients over a real server."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "marathon.py"


@pytest.mark.full
@pytest.mark.xdist_group("tiny")
@pytest.mark.parametrize(
    ("requests", "clients"), [(40, 8), pytest.param(2000, 32, marks=pytest.mark.full)]
)
def test_the_server_is_whole_in_the_end(
    requests: int, clients: int, tiny_engine: Callable[..., Path]
) -> None:
    engine = tiny_engine(3) if requests < 1000 else tiny_engine(3, max_batch=8)
    run = [
        sys.executable, str(SCRIPT), str(engine), "--requests", str(requests), "--clients",
        str(clients),
    ]  # fmt: skip
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "canary" in done.stdout
    assert "cancelled" in done.stdout
