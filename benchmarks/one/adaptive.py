"""Measures `--nextn auto` against nextn 0 where drafts are accepted at fixed rates.

Requests whose drafts are forced run the mixed program, so nextn 0 runs it in this comparison, too.
Plain requests are also measured: with the model's random weights their drafts are never accepted.
The first tokens of a request, from which the choice of nextn learns, are not counted.
"""

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from one.files import Workshop
from one.report import NONE, Aim, over
from one.run import Run
from one.section import Data, Found
from one.shapes import small
from one.sides import Measured, decode, ours, take_turns

MOST = 5  # drafts of `--nextn auto`
PLAIN, AUTO = "nextn 0", "nextn auto"
ODDS = (0.0, 0.3, 0.6, 0.85, 0.95)  # of each draft, if those before it were accepted
LOADS = ((32, 1), (32, 8), (1024, 1), (1024, 4), (8192, 1), (8192, 8))  # cached tokens, requests
STEPS = 120
SKIPPED = 32  # tokens at the start of each request that are not counted
WEIGHTS = "int8"
AIM = Aim(0.98, at_least=True)  # of nextn 0's tokens per second


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
        sides = [
            ours(PLAIN, plain, without, shop.vocabulary),
            ours(AUTO, auto, asks, shop.vocabulary),
        ]
        return {"layers": shape.config.num_hidden_layers, "rounds": take_turns(sides, run)}

    def tables(self, found: Found) -> list[Table]:
        title = (
            f"64 experts, {found.data['layers']} layers, {WEIGHTS}: tokens/s over nextn 0's ({AIM})"
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
                f"{load[0]:,} x {load[1]}", cell, *(ratio(found.measured, case) for case in cases)
            )
        return [grid]


def speed(measured: Measured, side: str, case: Case) -> float | None:
    """Return all requests' tokens per second after SKIPPED tokens each, the median of rounds."""
    found = []
    for answers in measured.rounds.get(side, ()):
        if (answer := answers.get(str(case))) is None:
            continue
        emitted = np.cumsum(answer["emitted"])
        first = int(np.searchsorted(emitted, SKIPPED * case.batch)) + 1
        found.append((emitted[-1] - emitted[first - 1]) / sum(answer["steps"][first:]))
    return statistics.median(found) if found else None


def ratio(measured: Measured, case: Case) -> str:
    found = over(speed(measured, AUTO, case), speed(measured, PLAIN, case.without()))
    if found is None:
        return NONE
    color = "green" if AIM.reached(found) else "red"
    return f"[{color}]{found:.2f}[/{color}]"
