"""Measures how long a running request waits for its next step while long prompts arrive.

python benchmarks/turns.py engines/tiny_n3_b8

Prompts of 1,500 tokens arrive one after the other, while one request runs all the time. The
99th percentile of the time between two of its steps must stay under the 99th percentile of one
chunk plus 1.5 median steps of the full batch; all are measured in the same run. The exit code is 1
if it does not. A prompt's last chunks attend to all earlier rows, so they take longer than the
median chunk.
"""

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from script import run

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.programs import StepOutput
from mtpbuild.runtime.request import FinishReason, Request


class Timed:
    """A wrapper of programs that times their calls."""

    def __init__(self, own: Any) -> None:
        self._own = own
        self.seconds: dict[str, list[float]] = {"prefill": [], "step": []}

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._own, name)
        if name not in ("prefill", "step"):
            return call

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments)
            self.seconds[name].append(time.perf_counter() - began)
            return result

        return timed


class Gaps:
    """An observer that records the times of a request's steps."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def step(self, request: Request, output: StepOutput, slot: int) -> None:
        self.at.append(time.perf_counter())

    def end(self, request: Request, reason: FinishReason) -> None:
        """Do nothing, as the end of a request is not recorded."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--length", type=int, default=1500)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    with Engine.load(arguments.engine, threads=arguments.threads) as engine:
        build = engine.manifest.build
        timed = engine._loop.programs = Timed(engine._loop.programs)
        gaps, waiting = Gaps(), arguments.prompts
        params = SamplingParams(max_tokens=build.max_seq_len - 1, ignore_eos=True)
        running = engine.stream([5], params, observer=gaps)
        others: list[Any] = []
        while waiting or others:
            others = [stream for stream in others if not stream._request.ended]
            while waiting and len(others) < build.slots - 1:
                prompt = [9 + (7 * i + waiting) % 1000 for i in range(arguments.length)]
                others.append(engine.stream(prompt, SamplingParams(max_tokens=40, ignore_eos=True)))
                waiting -= 1
            if running._request.ended:  # the request has filled its slot
                running = engine.stream([5], params, observer=gaps)
            next(running)
        between = [after - before for before, after in itertools.pairwise(gaps.at)]
    chunk, step = (statistics.median(timed.seconds[name]) for name in ("prefill", "step"))
    longest, late = (last_percent(values) for values in (timed.seconds["prefill"], between))
    bound = longest + 1.5 * step
    median = 1000 * statistics.median(between)
    print(
        f"chunk: median {1000 * chunk:.1f} ms, p99 {1000 * longest:.1f} ms; step {1000 * step:.1f} "
        f"ms; between two steps: median {median:.1f} ms, p99 {1000 * late:.1f} ms, "
        f"bound {1000 * bound:.1f} ms"
    )
    sys.exit(late > bound)


def last_percent(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


if __name__ == "__main__":
    run(main)
