"""Measures the host's share of a step: Python around the program against the program itself.

    python benchmarks/loop_overhead.py engines/tiny_n3 [--tokens 512] [--rounds 5] [--threads 2]

Each round streams one request with text and stop strings, as `mtpbuild run` does. The time inside
`Programs.step` is the program's; the rest of the request's decoding time is the host's. Prefill and
the first step are left out. It prints the median and 90th percentile over all steps. Steps don't
overlap, because overlapping would hide the host's time.
"""

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table
from script import TimedPrograms, parse_flags, run

from mtpbuild.runtime import Engine, SamplingParams

PROMPT = "def fibonacci(n):"


def measure(
    engine: Engine, tokens: int, prompt: list[int] | None = None
) -> tuple[list[float], list[float], float]:
    """Run one request; return each step's seconds in and outside the program, and tokens/step."""
    timed: Any = TimedPrograms(engine._loaded.loop.programs)
    engine._loaded.loop.programs = timed
    stop = ("\x00never\x00", "\x00ever\x00") if engine.tokenizer else ()
    params = SamplingParams(tokens, ignore_eos=True, stop=stop)
    asked: str | list[int] = prompt or (PROMPT if engine.tokenizer else [5, 6, 7])
    emitted = sum(len(chunk.token_ids) for chunk in engine.stream(asked, params))
    steps = timed.calls["step"]
    outside = [later - end for (_, end), (later, _) in pairwise(steps)]
    return timed.seconds("step")[1:], outside, emitted / len(steps)


def report(inside: Sequence[float], outside: Sequence[float], per_step: float) -> Table:
    table = Table("", "median us", "p90 us", title=f"{len(inside)} steps of {per_step:.2f} tokens")
    for name, seconds in (("program", inside), ("host", outside)):
        tenths = statistics.quantiles(seconds, n=10)
        table.add_row(name, f"{1e6 * tenths[4]:.1f}", f"{1e6 * tenths[8]:.1f}")
    share = statistics.median(outside) / (statistics.median(inside) + statistics.median(outside))
    table.add_row("host's share", f"{100 * share:.2f} %", "")
    return table


def main() -> None:
    arguments = parse_flags(__doc__, "engine", tokens=512, rounds=5, threads=None)
    with Engine.load(
        arguments.engine, threads=arguments.threads, overlap=False, prefix_cache=False
    ) as engine:
        measure(engine, arguments.tokens)  # warm up
        rounds = [measure(engine, arguments.tokens) for _ in range(arguments.rounds)]
    inside = [seconds for steps, _, _ in rounds for seconds in steps]
    outside = [seconds for _, steps, _ in rounds for seconds in steps]
    Console().print(report(inside, outside, statistics.mean(n for _, _, n in rounds)))


if __name__ == "__main__":
    run(main)
