"""Measures the host's share of a step: Python around the program against the program itself.

    python benchmarks/loop_overhead.py engines/tiny_n3 [--tokens 512] [--rounds 5] [--threads 2]

Each round streams one request with text and stop strings, as `mtpbuild run` does. The time inside
`Programs.step` is the program's; the rest of the request's decoding time is the host's. Prefill and
the first step are left out. It prints the median and 90th percentile over all steps. Steps don't
overlap, because overlapping would hide the host's time.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from script import run

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.controls import GREEDY, StepControls
from mtpbuild.runtime.contract.programs import Bools, Ints, Programs, StepOutput

PROMPT = "def fibonacci(n):"


class Timed:
    """A wrapper of programs that records when each step starts and ends, in seconds."""

    def __init__(self, programs: Programs) -> None:
        self.programs, self.lookahead = programs, programs.lookahead
        self.features = programs.features
        self.begun: list[float] = []
        self.ended: list[float] = []

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        self.programs.prefill(slot, start, tokens)

    def begin(self, slot: int, length: int, newest: int, controls: StepControls = GREEDY) -> None:
        self.programs.begin(slot, length, newest, controls)

    def move(self, source: int, target: int) -> None:
        self.programs.move(source, target)

    def finite(self, slot: int, rows: int) -> bool:
        return self.programs.finite(slot, rows)

    def clear(self, slot: int) -> None:
        self.programs.clear(slot)

    def step(self, active: Bools, rows: int) -> StepOutput:
        self.begun.append(time.perf_counter())
        output = self.programs.step(active, rows)
        self.ended.append(time.perf_counter())
        return output


def measure(engine: Engine, tokens: int) -> tuple[list[float], list[float], float]:
    """Run one request; return each step's seconds in and outside the program, and tokens/step."""
    timed = engine._loop.programs = Timed(_programs(engine))
    stop = ("\x00never\x00", "\x00ever\x00") if engine.tokenizer else ()
    params = SamplingParams(tokens, ignore_eos=True, stop=stop)
    prompt = PROMPT if engine.tokenizer else [5, 6, 7]
    emitted = sum(len(chunk.token_ids) for chunk in engine.stream(prompt, params))
    inside = [end - begin for begin, end in zip(timed.begun, timed.ended, strict=True)][1:]
    outside = [begin - end for begin, end in zip(timed.begun[1:], timed.ended, strict=False)]
    return inside, outside, emitted / len(timed.begun)


def report(inside: Sequence[float], outside: Sequence[float], per_step: float) -> Table:
    table = Table("", "median us", "p90 us", title=f"{len(inside)} steps of {per_step:.2f} tokens")
    for name, seconds in (("program", inside), ("host", outside)):
        tenths = statistics.quantiles(seconds, n=10)
        table.add_row(name, f"{1e6 * tenths[4]:.1f}", f"{1e6 * tenths[8]:.1f}")
    share = statistics.median(outside) / (statistics.median(inside) + statistics.median(outside))
    table.add_row("host's share", f"{100 * share:.2f} %", "")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    with Engine.load(arguments.engine, threads=arguments.threads, overlap=False) as engine:
        measure(engine, arguments.tokens)  # warm up
        rounds = [measure(engine, arguments.tokens) for _ in range(arguments.rounds)]
    inside = [seconds for steps, _, _ in rounds for seconds in steps]
    outside = [seconds for _, steps, _ in rounds for seconds in steps]
    Console().print(report(inside, outside, statistics.mean(n for _, _, n in rounds)))


def _programs(engine: Engine) -> Programs:
    programs = engine._loop.programs
    return programs.programs if isinstance(programs, Timed) else programs


if __name__ == "__main__":
    run(main)
