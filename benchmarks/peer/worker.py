"""Runs one peer in its own process: answers requests in lines of JSON, and times tokens.

It needs only the standard library, because it runs in the measured peer's environment.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
# Takes prompt ids and a number of tokens; yields the new tokens as they arrive.
Generate = Callable[[list[int], int], Iterable[list[int]]]


def serve(load: Callable[[], Generate]) -> None:
    """Report how long loading took, then answer lines of standard input until it ends."""
    answer = open_answers()
    try:
        generate = load()
    except Exception as error:
        answer({"error": line(error)})
        return
    answer({"load_s": time.perf_counter() - STARTED})
    for text in sys.stdin:
        asked = json.loads(text)
        try:
            answer(timed(generate, asked["prompt"], asked["max_tokens"]))
        except Exception as error:
            answer({"error": line(error)})


def open_answers() -> Callable[[dict[str, Any]], None]:
    """Return a function that writes an answer; libraries' prints go to standard error instead."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return lambda content: print(json.dumps(content), file=answers, flush=True)


def timed(generate: Generate, prompt: list[int], count: int) -> dict[str, Any]:
    """Collect the tokens and their times: each token's seconds since the request."""
    tokens, times = list[int](), list[float]()
    start = time.perf_counter()
    for new in generate(prompt, count):
        now = time.perf_counter() - start
        tokens += new
        times += [now] * len(new)
    return {"tokens": tokens[:count], "times": times[:count], "memory": resident()}


def resident(kind: str = "VmRSS") -> int | None:
    """Return this process's bytes of memory, on Linux only.

    kind: a field of /proc/self/status, such as VmHWM, the peak, or RssAnon, anonymous memory.
    """
    status = Path("/proc/self/status")
    rows = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    sizes = (int(row.split()[1]) * 1024 for row in rows if row.startswith(f"{kind}:"))
    return next(sizes, None)


def count_read_bytes() -> int:
    """Return the bytes that this process has read from disks, on Linux; else 0."""
    counts = Path("/proc/self/io")
    rows = counts.read_text(encoding="utf-8").splitlines() if counts.exists() else []
    return next((int(row.split()[1]) for row in rows if row.startswith("read_bytes:")), 0)


def line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
