"""Shared code of both sides of `one_machine.py`: a line of JSON for the job, and for each ask.

    python ours_side.py JOB        python llama_side.py JOB

A job is JSON: the engine or GGUF file, threads, the rows that a sequence may need, and the
vocabulary. The first answer is `first_s`: seconds from before loading to the first token after a
prompt of 8. Asks are read from standard input. Besides the measured side, only the standard library
is needed.
"""

import contextlib
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from worker import open_answers, resident

FIRST = 8  # tokens of the first prompt
Ask = dict[str, Any]
Answer = dict[str, Any]


class Side(Protocol):
    """A loaded engine or model."""

    def prompt(self, tokens: list[int]) -> None:
        """Run a prompt and generate one token."""

    def decode(self, ask: Ask) -> Answer:
        """Generate tokens after `context` cached ones in each of `batch` sequences.

        filled: caches are filled without a prompt. The answer has `steps`, the seconds of each, and
        the number of tokens that all steps emitted.
        """
        ...


def tokens(count: int, vocabulary: int, seed: int = 0) -> list[int]:
    """Draw random ids, because equal ids would all choose the same experts.

    No list is a prefix of another, so that no prompt can reuse rows of an earlier one.
    """
    draw = random.Random(f"{seed} {count}")
    return [draw.randrange(vocabulary) for _ in range(count)]


def serve(load: Callable[[Ask], Side]) -> None:
    """Answer a job, then its asks until there are no more."""
    write = open_answers()
    with contextlib.suppress(OSError):  # if memory runs out, kill this process first
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")

    def answer(content: Answer) -> None:
        write(content | {kind: resident(kind) for kind in ("VmHWM", "RssAnon")})

    job = json.loads(sys.argv[1])
    start = time.perf_counter()
    side = load(job)
    side.prompt(tokens(FIRST, job["vocabulary"]))
    answer({"first_s": time.perf_counter() - start})
    for ask in map(json.loads, sys.stdin):
        answer(side.decode(ask) if ask["kind"] == "decode" else prompts(side, ask, job))


def prompts(side: Side, ask: Ask, job: Ask) -> Answer:
    """Time different prompts of one length, each to the first token after it."""
    seconds = []
    for seed in range(ask["times"]):
        prompt = tokens(ask["length"], job["vocabulary"], seed)
        start = time.perf_counter()
        side.prompt(prompt)
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds}
