"""One peer in a process of its own: answers requests, a line of JSON each, and times its tokens.

Standard library only: it runs in the environment of whatever it measures.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
# Prompt ids and how many tokens to make -> the new tokens, as they come.
Generate = Callable[[list[int], int], Iterable[list[int]]]
Extras = dict[str, Callable[[], dict[str, Any]]]


def serve(load: Callable[[], Generate], extras: Callable[[], Extras] = dict) -> None:
    """Say how long loading took, then answer lines of standard input until it ends.

    extras: other questions that the peer knows, by their name. Made after loading.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not an answer

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    try:
        generate = load()
    except Exception as error:
        answer({"error": line(error)})
        return
    answer({"load_s": time.perf_counter() - STARTED})
    for text in sys.stdin:
        asked = json.loads(text)
        try:
            if "extra" in asked:
                known = extras()
                answer(known[asked["extra"]]() if asked["extra"] in known else {})
            else:
                answer(timed(generate, asked["prompt"], asked["max_tokens"]))
        except Exception as error:
            answer({"error": line(error)})


def timed(generate: Generate, prompt: list[int], count: int) -> dict[str, Any]:
    """tokens; times: seconds since the request at which each of them was there."""
    tokens, times = list[int](), list[float]()
    start = time.perf_counter()
    for new in generate(prompt, count):
        now = time.perf_counter() - start
        tokens += new
        times += [now] * len(new)
    return {"tokens": tokens[:count], "times": times[:count], "memory": resident()}


def resident(kind: str = "VmRSS") -> int | None:
    """Bytes of memory that this process has now, where Linux says so.

    kind: of /proc/self/status; VmHWM is the most that it ever had, RssAnon what maps no file.
    """
    try:
        for row in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if row.startswith(f"{kind}:"):
                return int(row.split()[1]) * 1024
    except OSError:
        pass
    return None


def line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
