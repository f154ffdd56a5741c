"""A server that is killed starts again with the prefixes that its folder has."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytestmark = [pytest.mark.xdist_group("tiny"), pytest.mark.full]
PROMPT = "def fibonacci(n):\n    " * 20


def ask(url: str) -> tuple[list[int], int]:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20, "return_token_ids": True}
    told: dict[str, Any] = httpx2.post(f"{url}/v1/completions", json=body, timeout=120).json()
    cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    return told["choices"][0]["token_ids"], int(cached)


def test_a_killed_server_starts_with_what_was_on_disk(
    tiny_engine: Callable[..., Path], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "mtpbuild", "serve", "--engine", str(tiny_engine(3))]
    command += ["--port", "0", "--no-access-log", "--prefix-cache-dir", str(tmp_path / "kept")]
    answers = []
    for _ in range(3):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            line = next(line for line in process.stderr if line.startswith("serving"))
            answers.append(ask(line.split()[-1]))
            time.sleep(2)  # what the answer left is written behind its back
            process.kill()
    texts, cached = zip(*answers, strict=True)
    assert texts[0] == texts[1] == texts[2]
    assert cached[0] == 0
    assert min(cached[1:]) > 100
