"""Measures `--nextn auto` where drafts are accepted at fixed rates.

It is compared with an engine of nextn 0, and with the best fixed number of drafts: programs of the
same engine, each with the time of its step and the tokens that the rate lets it emit. Requests
whose drafts are forced run the mixed program, so nextn 0 runs it in this comparison, too. Plain
requests are also measured: with the model's random weights their drafts are never accepted. The
first tokens of a request, from which the choice of nextn learns, are not counted.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from one.files import Workshop
from one.report import NONE, Aim, over
from one.run import Run
from one.section import Data, Found
from one.shapes import small
from one.sides import WARM, Measured, decode, ours, take_turns

MOST = 5  # drafts of `--nextn auto`
COUNTS = range(MOST + 1)
PLAIN, AUTO = "nextn 0", "nextn auto"
ODDS = (0.0, 0.3, 0.6, 0.85, 0.95)  # of each draft, if those before it were accepted
LOADS = ((32, 1), (32, 8), (1024, 1), (1024, 4), (8192, 1), (8192, 8))  # cached tokens, requests
STEPS, FIXED_STEPS = 120, 66  # without drafts the MTP module runs once in 32 steps
SKIPPED = 32  # tokens at the start of each request that are not counted
WEIGHTS = "int8"
AIM = Aim(0.98, at_least=True)  # of nextn 0's tokens per second
AIM_BEST = Aim(0.96, at_least=True)  # of the best fixed number's


@dataclass(frozen=True)
class Case:
    """A number of requests, each with `context` cached tokens and drafts of equal odds.

    odds: None stands for plain requests.
    """

    context: int
    batch: int
    odds: float | None

    def __str__(self) -> str:
        return f"{self.context} x {self.batch}, {self.odds}"

    @property
    def rates(self) -> tuple[float, ...] | None:
        odds = self.odds
        return None if odds is None else tuple(odds**i for i in range(1, MOST + 1))

    def tokens(self, nextn: int) -> float:
        """Return the expected tokens of a request's step with that many drafts."""
        return 1 + sum((self.rates or (0.0,) * MOST)[:nextn])

    def fixed(self, nextn: int) -> str:
        """Return the name of the ask whose steps have that many drafts; its odds don't matter."""
        program = "plain" if self.odds is None else "mixed"
        return f"{self.context} x {self.batch}, {program}, {nextn}"

    def without(self) -> "Case":
        """Return the case for the engine without drafts that it is compared with."""
        return Case(self.context, self.batch, None if self.odds is None else 0.0)


CASES = [Case(*load, odds) for load in LOADS for odds in (None, *ODDS)]


class Adaptive:
    def measure(self, run: Run) -> Data:
        shape = small(run.layers, WEIGHTS)
        shop = Workshop(run.folder, shape, run.watch)
        shop.write_checkpoint()
        contexts, batches = zip(*LOADS, strict=True)
        length = max(contexts) + (STEPS + max(batches)) * (MOST + 1)
        flags = ("--max-seq-len", str(length), "--max-batch", str(max(batches)))
        plain, auto = (shop.build(f"n{n}", (n,), *flags)[0] for n in (0, "auto"))
        shop.drop_checkpoint()
        without, asks = dict[str, Any](), dict[str, Any]()
        for case in CASES:
            load = case.context, case.batch
            without[str(case.without())] = decode(
                STEPS, *load, rates=None if case.odds is None else ()
            )
            asks[str(case)] = decode(STEPS, *load, rates=case.rates)
            if case.odds in (None, ODDS[0]):
                steps = (decode(FIXED_STEPS, *load, rates=case.rates, nextn=k) for k in COUNTS)
                asks |= zip(map(case.fixed, COUNTS), steps, strict=True)
        sides = [
            ours(PLAIN, plain, without, shop.vocabulary),
            ours(AUTO, auto, asks, shop.vocabulary),
        ]
        return {"layers": shape.config.num_hidden_layers, "rounds": take_turns(sides, run)}

    def tables(self, found: Found) -> list[Table]:
        shape = f"64 experts, {found.data['layers']} layers, {WEIGHTS}"
        title = (
            f"{shape}: tokens/s over nextn 0's ({AIM}); over the best fixed nextn's ({AIM_BEST}): "
            "as measured / if its steps took as long as fixed ones"
        )
        grid = Table("cached x requests", "nextn 0, tokens/s", title=title, title_justify="left")
        for odds in (None, *ODDS):
            name = "plain, none accepted" if odds is None else f"accepted at {odds}"
            grid.add_column(name, justify="right")
        for load in LOADS:
            cases = [Case(*load, odds) for odds in (None, *ODDS)]
            plain = speed(found.measured, PLAIN, cases[0])
            cell = NONE if plain is None else f"{plain:.4g}"
            grid.add_row(
                f"{load[0]:,} x {load[1]}", cell, *(ratios(found.measured, case) for case in cases)
            )
        return [grid]


def speed(measured: Measured, side: str, case: Case) -> float | None:
    """Return all requests' tokens per second after SKIPPED tokens each, the median of rounds."""
    found = []
    for answers in measured.rounds.get(side, ()):
        if (answer := answers.get(str(case))) is None:
            continue
        first, emitted = after_skipped(answer, case)
        found.append(emitted / sum(answer["steps"][first:]))
    return statistics.median(found) if found else None


def speed_of_choices(measured: Measured, case: Case) -> float | None:
    """Return `speed` as if each step took as long as the fixed steps with as many drafts.

    So what its choices lose is told apart from the machine's changes between two asks.
    """
    found = []
    for answers in measured.rounds.get(AUTO, ()):
        if (answer := answers.get(str(case))) is None:
            continue
        seconds = [fixed_step(answers, case, nextn) for nextn in COUNTS]
        first, emitted = after_skipped(answer, case)
        times = [seconds[nextn] for nextn in answer["nextns"][first:]]
        known = [each for each in times if each is not None]
        if len(known) == len(times):
            found.append(emitted / sum(known))
    return statistics.median(found) if found else None


def after_skipped(answer: Mapping[str, Any], case: Case) -> tuple[int, int]:
    """Return the first step after SKIPPED tokens of each request, and the tokens from it on."""
    emitted = np.cumsum(answer["emitted"])
    first = int(np.searchsorted(emitted, SKIPPED * case.batch)) + 1
    return first, int(emitted[-1] - emitted[first - 1])


def fixed_step(answers: Mapping[str, Any], case: Case, nextn: int) -> float | None:
    """Return the mean seconds of a round's steps with a fixed number of drafts."""
    answer = answers.get(case.fixed(nextn))
    return None if answer is None else statistics.fmean(answer["steps"][WARM:])


def best_fixed(measured: Measured, case: Case) -> tuple[float, int] | None:
    """Return the tokens per second of the best fixed nextn, and that nextn."""
    found = []
    for nextn in COUNTS:
        means = [fixed_step(each, case, nextn) for each in measured.rounds.get(AUTO, ())]
        if known := [mean for mean in means if mean is not None]:
            found.append((case.batch * case.tokens(nextn) / statistics.median(known), nextn))
    return max(found, default=None)


def ratios(measured: Measured, case: Case) -> str:
    """Show the speed over nextn 0's, and over the best fixed nextn's: measured, by its choices."""
    own, best = speed(measured, AUTO, case), best_fixed(measured, case)
    first = over(own, speed(measured, PLAIN, case.without()))
    choices = speed_of_choices(measured, case)
    if best is None or first is None or own is None or choices is None:
        return NONE
    shares = (AIM_BEST.colored(each / best[0]) for each in (own, choices))
    return f"{AIM.colored(first)}; {' / '.join(shares)} ({best[1]})"
