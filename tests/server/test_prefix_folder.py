"""A server that is killed starts again with the prefixes that its folder has."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.live_server import url_of

pytestmark = [pytest.mark.xdist_group("tiny"), pytest.mark.full]
PROMPT = "def fibonacci(n):\n    " * 20


def ask(url: str) -> tuple[tuple[int, ...], int, int]:
    """Return the answer's tokens, how many of the prompt's were there, and how many it has."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20, "return_token_ids": True}
    told: dict[str, Any] = httpx2.post(f"{url}/v1/completions", json=body, timeout=120).json()
    usage = told["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return tuple(told["choices"][0]["token_ids"]), cached, usage["prompt_tokens"]


def row_files(kept: Path, since: int) -> list[Path]:
    """Wait until all rows of the prompt are in files: they are written behind the answer's back."""
    end = time.monotonic() + 60
    while len(files := sorted(kept.glob("*.rows"))) < since and time.monotonic() < end:
        time.sleep(0.1)
    assert len(files) >= since
    return files


def test_a_killed_server_starts_with_what_was_on_disk(
    tiny_engine: Callable[..., Path], tmp_path: Path
) -> None:
    """Killed in the middle of an answer too; a damaged file costs its tokens and a line."""
    kept, answers, output = tmp_path / "kept", [], []
    command = [sys.executable, "-m", "mtpbuild", "serve", "--engine", str(tiny_engine(3))]
    command += ["--port", "0", "--no-access-log", "--prefix-cache-dir", str(kept)]
    for life in range(4):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            url = url_of(process)
            answers.append(ask(url))
            files = row_files(kept, answers[0][2] // 64)
            if life == 1:
                body = {"prompt": PROMPT * 2, "max_tokens": 500, "stream": True}
                with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as told:
                    next(told.iter_lines())
                    process.kill()
            process.kill()
            output.append(process.stderr.read())
        if life == 2:
            for file in files:
                data = bytearray(file.read_bytes())
                data[-1000] ^= 1
                file.write_bytes(data)
    texts, cached, _ = zip(*answers, strict=True)
    assert set(texts) == {texts[0]}
    assert cached[0] == cached[3] == 0
    assert min(cached[1:3]) > 100
    assert [each.count("damaged, so its tokens are filled in anew") for each in output] == [
        0, 0, 0, 1,
    ]  # fmt: skip
