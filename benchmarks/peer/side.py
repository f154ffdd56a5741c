"""Shared code of both sides of `one_machine.py`: reads a job, writes a line of JSON per answer.

    python ours_side.py JOB.json        python llama_side.py JOB.json

A job names the engine or GGUF file, threads, the rows that a sequence may need, the vocabulary and
the asks. The first answer is `first_s`: seconds from before loading to the first token after a
prompt of 8. Besides the measured side, only the standard library is needed.
"""

import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from worker import resident

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
    """Answer a job; libraries' own prints go to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with contextlib.suppress(OSError):  # if memory runs out, kill this process first
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")

    def answer(content: Answer) -> None:
        memory = {kind: resident(kind) for kind in ("VmHWM", "RssAnon")}
        print(json.dumps(content | memory), file=answers, flush=True)

    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    start = time.perf_counter()
    side = load(job)
    side.prompt(tokens(FIRST, job["vocabulary"]))
    answer({"first_s": time.perf_counter() - start})
    for ask in job["asks"]:
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
