"""What the programs of both sides of `one_machine.py` share: a job in, a line of JSON per answer.

    python ours_side.py JOB.json        python llama_side.py JOB.json

A job names the engine or GGUF file, threads, rows that a sequence may need, the vocabulary and what
is asked. The first answer is `first_s`: seconds from before loading to the first token behind a
prompt of 8. Standard library only, but for what is measured.
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
    """An engine or a model, loaded."""

    def prompt(self, tokens: list[int]) -> None:
        """Take a prompt in and make one token."""

    def decode(self, ask: Ask) -> Answer:
        """Make tokens behind `context` cached ones in each of `batch` sequences.

        filled: caches are filled without a prompt. Answers `steps`, seconds of each, and the
        number of tokens that all of them emitted.
        """
        ...


def tokens(count: int, vocabulary: int, seed: int = 0) -> list[int]:
    """Random ids: equal ones would all go to the same experts.

    No list is the beginning of another: rows of one prompt could be taken for the next.
    """
    draw = random.Random(f"{seed} {count}")
    return [draw.randrange(vocabulary) for _ in range(count)]


def serve(load: Callable[[Ask], Side]) -> None:
    """Answer a job; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with contextlib.suppress(OSError):  # if memory runs out, this process is the one to end
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
    """Seconds of prompts of one length, each another one, to the first token behind it."""
    seconds = []
    for seed in range(ask["times"]):
        prompt = tokens(ask["length"], job["vocabulary"], seed)
        start = time.perf_counter()
        side.prompt(prompt)
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds}
