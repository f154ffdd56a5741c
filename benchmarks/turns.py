"""Measures how long a running request waits for its next step while long prompts arrive.

python benchmarks/turns.py engines/tiny_n3_b8

Prompts of 1,500 tokens arrive one after the other, while one request runs all the time. The
99th percentile of the time between two of its steps must stay under the 99th percentile of one
chunk plus 1.5 median steps of the full batch; all are measured in the same run. The exit code is 1
if it does not. A prompt's last chunks attend to all earlier rows, so they take longer than the
median chunk.
"""

import itertools
import statistics
import sys
import time
from typing import Any

from script import TimedPrograms, parse_flags, run

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.programs import StepOutput
from mtpbuild.runtime.requests.request import FinishReason, Request


class Gaps:
    """An observer that records the times of a request's steps."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def step(self, request: Request, output: StepOutput, slot: int) -> None:
        self.at.append(time.perf_counter())

    def end(self, request: Request, reason: FinishReason) -> None:
        """Do nothing, as the end of a request is not recorded."""


def main() -> None:
    arguments = parse_flags(__doc__, "engine", prompts=40, length=1500, threads=None)
    with Engine.load(arguments.engine, threads=arguments.threads, prefix_cache=False) as engine:
        build = engine.manifest.build
        timed: Any = TimedPrograms(engine._loop.programs)
        engine._loop.programs = timed
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
    chunk, step = (statistics.median(timed.seconds(name)) for name in ("prefill", "step"))
    longest, late = (last_percent(values) for values in (timed.seconds("prefill"), between))
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
