"""Ctrl-C as the system sends it: a clean end, exit code 130, no traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import write_engine
from tests.support.fakes import fake_manifest

ROOT = Path(__file__).parents[2]
SLOW = """
import signal
from mtpbuild.builder.cli import app
from mtpbuild.runtime.engine import engine
from tests.support.fakes import FakePrograms
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
engine.load_programs = lambda folder, manifest, **options: FakePrograms(manifest, step_s=0.005)
app()
"""


@pytest.mark.parametrize("way", ["--prompt-ids", "--input", "--json"])
def test_sigint(tmp_path: Path, way: str) -> None:
    folder = tmp_path / "engine"
    write_engine(folder, fake_manifest(max_seq_len=100_000))
    (tmp_path / "in.jsonl").write_text('{"input_ids": [5], "output_tokens": 3}\n' * 3 + LONG)
    prompt = ["--prompt-ids", "5"] if way == "--prompt-ids" else ["--input", "in.jsonl"]
    flags = ["run", "--engine", str(folder), "--max-tokens", "90000", *prompt]
    command = [sys.executable, "-uc", SLOW, *flags, *(["--json"] if way == "--json" else [])]
    environment, pipe = os.environ | {"PYTHONPATH": str(ROOT)}, subprocess.PIPE
    process: Any = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe
    )
    assert process.stdout.read(1)  # it has begun to answer
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.decode().splitlines()[-1] == "interrupted"
    assert b"Traceback" not in errors


LONG = '{"input_ids": [5], "output_tokens": 90000}\n' * 5
