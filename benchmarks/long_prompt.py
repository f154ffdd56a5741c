"""Measures a long prompt beside running users: how much each slows the other down.

    python benchmarks/long_prompt.py engines/tiny_n3_b8 [--prompt 2047] [--users 4]
        [--chunked-prefill-size 64]

A chunk of the prompt runs between two steps of the users. It prints how long a step of theirs takes
meanwhile, over a step without the prompt, and how long the prompt takes, over the time without
users. Chunks and steps take turns, so these two can't both be small: if steps have the share s of
the time, a step takes 1 / s as long, and the prompt 1 / (1 - s).

--chunked-prefill-size is that of `mtpbuild serve`. Medians of --rounds.
"""

import statistics
import sys
import time
from itertools import pairwise

from rich.console import Console
from rich.table import Table
from script import parse_flags, run

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.programs import StepOutput
from mtpbuild.runtime.requests.request import FinishReason, Request

USER_PROMPT, AFTER = 32, 24  # tokens of the users' prompts; their steps after the long prompt


class Clock:
    """An observer: when the users' steps came, and when the long prompt began and had a token."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.began = self.ended = 0.0

    def step(self, request: Request, output: StepOutput, slot: int) -> None:
        now = time.perf_counter()
        if len(request.prompt) > USER_PROMPT:
            self.began, self.ended = request.started or now, now
        elif slot == 0:  # the first user's steps stand for all
            self.steps.append(now)

    def end(self, request: Request, reason: FinishReason) -> None:
        pass

    @property
    def prompt_seconds(self) -> float:
        return self.ended - self.began

    def step_seconds(self, *, beside: bool) -> float:
        """Return the median seconds of a step beside the prompt, or after it."""
        times = [at for at in self.steps if at >= self.began and (at <= self.ended) == beside]
        return statistics.median(later - at for at, later in pairwise(times))


def measure(engine: Engine, prompt: list[int], users: int) -> Clock:
    clock, build = Clock(), engine.manifest.build
    chunks = -(-len(prompt) // engine._loaded.loop._chunk_beside)
    steps = min((chunks + users + AFTER) * (build.nextn + 1), build.max_seq_len - USER_PROMPT)
    prompts = [[5 + user + i for i in range(USER_PROMPT)] for user in range(users)] + [prompt]
    params = [SamplingParams(steps, ignore_eos=True)] * users + [SamplingParams(1, ignore_eos=True)]
    engine.generate(prompts, params, observer=clock)
    return clock


def main() -> None:
    arguments = parse_flags(
        __doc__, "engine", prompt=2047, users=4, rounds=3, chunked_prefill_size=None
    )
    size = arguments.chunked_prefill_size
    with Engine.load(arguments.engine, prefix_cache=False, chunked_prefill_size=size) as engine:
        build = engine.manifest.build
        if arguments.prompt >= build.max_seq_len or arguments.users >= build.slots:
            sys.exit(f"the engine has {build.slots} slots of {build.max_seq_len} tokens")
        prompt = [7 + i % 200 for i in range(arguments.prompt)]
        measure(engine, prompt, 0)
        alone, beside = list[Clock](), list[Clock]()
        for _ in range(arguments.rounds):
            alone.append(measure(engine, prompt, 0))
            beside.append(measure(engine, prompt, arguments.users))
    rows = {
        "a step of the users": (
            [clock.step_seconds(beside=False) for clock in beside],
            [clock.step_seconds(beside=True) for clock in beside],
        ),
        "the prompt": (
            [clock.prompt_seconds for clock in alone],
            [clock.prompt_seconds for clock in beside],
        ),
    }
    grid = Table("", "alone, ms", "together, ms", "ratio")
    for name, seconds in rows.items():
        one, both = map(statistics.median, seconds)
        grid.add_row(name, f"{1000 * one:.1f}", f"{1000 * both:.1f}", f"{both / one:.2f}")
    Console().print(grid)


if __name__ == "__main__":
    run(main)
