"""The arithmetic of a benchmark. Times are in seconds; the JSON has milliseconds."""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from mtpbuild.builder.bench.measure import Contender, Measured, Sample, intervals
from mtpbuild.builder.plan import Nextn
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.stats import AcceptanceCounter, SpeculativeDecoding

ALL = "all"
RESAMPLES = 1000
AGREEMENT = 0.05  # largest relative difference of measured and predicted speedup
T = TypeVar("T")
Groups = Sequence[Sequence[Sample]]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A quotient with its 95 % interval, from resampling the requests."""

    value: float
    low: float | None  # None if there was only one group of requests
    high: float | None

    @property
    def interval(self) -> str:
        return "-" if self.low is None else f"{self.low:.2f}-{self.high:.2f}"


@dataclass(frozen=True, slots=True)
class Cost:
    """The median seconds of a step after the same contexts."""

    base: float  # nextn 0
    verify: float | None  # nextn + 1 tokens, no drafts; None for "auto", which has no verifier
    step: float

    @property
    def whole(self) -> float:
        """Return v + d: a whole step relative to a step without drafts."""
        return self.step / self.base

    @property
    def v(self) -> float | None:
        return None if self.verify is None else self.verify / self.base

    @property
    def d(self) -> float | None:
        return None if self.verify is None else (self.step - self.verify) / self.base

    @property
    def draft_share(self) -> float | None:
        return None if self.verify is None else 1 - self.verify / self.step


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one nextn, over the requests of one kind or over all."""

    requests: int
    input_tokens: int
    output_tokens: int
    duration: float  # seconds in which these requests ran
    ttft: list[float]  # per request
    tpot: list[float]  # per request with two tokens or more
    itl: list[float]  # per step except each request's first
    e2el: list[float]  # per request
    tokens_per_s: float  # of one user, after the first token
    tokens_per_step: float  # tokens that were kept; each request's first step is left out
    drafting: SpeculativeDecoding
    speedup: Ratio  # of tokens_per_s over nextn 0
    predicted: float | None  # tokens_per_step / (v + d); None for "auto", whose steps differ
    same_output: int  # requests that gave the same tokens as with nextn 0

    @property
    def throughput(self) -> float:
        """Count the output tokens per second of all users; the time includes the prompts."""
        return self.output_tokens / self.duration


@dataclass(frozen=True, slots=True)
class Row:
    """All figures of one nextn."""

    nextn: Nextn
    drafter: str | None
    cost: Cost
    kinds: dict[str, Figures]  # ALL first

    @property
    def overall(self) -> Figures:
        return self.kinds[ALL]

    @property
    def most(self) -> int:
        """Return the largest number of drafts in a step."""
        return self.overall.drafting.num_spec_tokens


def rows(contenders: Sequence[Contender], measured: dict[Nextn, Measured]) -> list[Row]:
    """Compute a row per nextn; raise UsageError if there is nothing to time."""
    base = measured[0]
    kinds = list(dict.fromkeys(group[0].prompt.kind for group in base.groups))
    if any(decode(of_kind(base.groups, kind))[1] == 0 or not base.steps for kind in kinds):
        raise UsageError("no request gave two tokens: there is nothing to time; see --output-len")
    result = []
    for contender in contenders:
        mine = measured[contender.nextn]
        cost = cost_of(base, mine, contender.nextn)
        figures = {
            kind: figures_of(of_kind(mine.groups, kind), of_kind(base.groups, kind), cost)
            for kind in (ALL, *kinds)
        }
        result.append(Row(contender.nextn, contender.drafter, cost, figures))
    return result


def figures_of(groups: Groups, base: Groups, cost: Cost) -> Figures:
    samples = [sample for group in groups for sample in group]
    others = [sample for group in base for sample in group]
    tokens, seconds = decode(groups)
    steps = sum(len(s.times) - 1 for s in samples)
    per_step = tokens / steps
    return Figures(
        requests=len(samples),
        input_tokens=sum(len(s.prompt.token_ids) for s in samples),
        output_tokens=sum(len(s.token_ids) for s in samples),
        duration=sum(max(s.times[-1] for s in g) - min(s.begun for s in g) for g in groups),
        ttft=[s.times[0] - s.begun for s in samples],
        tpot=[decode([[s]])[1] / n for s in samples if (n := len(s.token_ids) - 1)],
        itl=[interval for s in samples for interval in intervals(s)],
        e2el=[s.times[-1] - s.begun for s in samples],
        tokens_per_s=tokens / seconds,
        tokens_per_step=per_step,
        drafting=merged([s.drafting for s in samples if s.drafting is not None]),
        speedup=speedup(groups, base),
        predicted=None if cost.verify is None else per_step / cost.whole,
        same_output=sum(s.token_ids == o.token_ids for s, o in zip(samples, others, strict=True)),
    )


def cost_of(base: Measured, mine: Measured, nextn: Nextn) -> Cost:
    """Take the medians; nextn 0 has no verifier, as it only verifies itself."""
    step = statistics.median(mine.steps)
    verify = statistics.median(mine.verify) if mine.verify else step
    return Cost(statistics.median(base.steps), None if nextn == "auto" else verify, step)


def of_kind(groups: Groups, kind: str) -> Groups:
    return [group for group in groups if kind in (ALL, group[0].prompt.kind)]


def decode(groups: Groups) -> tuple[int, float]:
    """Count the tokens after each request's first one, and the seconds that they took."""
    samples = [sample for group in groups for sample in group]
    tokens = sum(len(s.token_ids) - 1 for s in samples)
    return tokens, math.fsum(s.times[-1] - s.times[0] for s in samples)


def speedup(groups: Groups, base: Groups) -> Ratio:
    """Compute how much faster a user gets tokens; the interval is from resampled groups."""
    parts = [(*decode([g]), *decode([b])) for g, b in zip(groups, base, strict=True)]

    def ratio(drawn: Sequence[tuple[int, float, int, float]]) -> float | None:
        tokens, seconds, base_tokens, base_seconds = map(sum, zip(*drawn, strict=True))
        divisor = seconds * base_tokens
        return tokens * base_seconds / divisor if divisor else None

    interval = resampled(parts, ratio) if len(parts) > 1 else (None, None)
    return Ratio(ratio(parts) or 0.0, *interval)


def resampled(items: Sequence[T], figure: Callable[[Sequence[T]], float | None]) -> list[float]:
    """Resample the items; return both ends of the figure's 95 % interval."""
    rng = random.Random(0)
    drawn = [figure(rng.choices(items, k=len(items))) for _ in range(RESAMPLES)]
    known = [value for value in drawn if value is not None]
    return [percentile(known, 2.5), percentile(known, 97.5)]


def percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def merged(reports: Sequence[SpeculativeDecoding]) -> SpeculativeDecoding:
    """Add up the drafting statistics of several requests."""
    total = AcceptanceCounter(reports[0].num_spec_tokens)
    for report in reports:
        total.drafted += report.num_draft_tokens
        total.tokens += report.num_spec_steps + report.num_accepted_draft_tokens
        for accepted, steps in enumerate(report.acceptance_histogram):
            total.histogram[accepted] += steps
    return total.report()


def recommendation(table: Sequence[Row]) -> tuple[Nextn, str]:
    """Choose the fastest nextn, and write in one line whether MTP pays."""
    drafting = [row for row in table if row.nextn]
    if not drafting:
        return 0, "only nextn 0 was measured: give --nextn 0,1,2,3"
    best = max(drafting, key=lambda row: row.overall.speedup.value)
    ratio, cost = best.overall.speedup, best.cost.whole
    named = f"nextn {best.nextn}, {ratio.value:.2f}x ({ratio.interval})"
    why = f"{best.overall.tokens_per_step:.2f} tokens per step at {cost:.2f} times the step's cost"
    if ratio.low is not None and ratio.low > 1:
        return best.nextn, f"MTP pays: {named}; {why}{kinds_apart(drafting, best)}"
    if ratio.value > 1:
        return best.nextn, f"MTP may pay, too few requests to be sure: {named}; {why}"
    return 0, f"MTP does not pay: nextn 0 is the fastest, then {named}; {why}"


def disagreements(table: Sequence[Row]) -> str | None:
    """Name each nextn whose measured and predicted speedups are too far apart."""
    apart = []
    for row in table:
        measured, predicted = row.overall.speedup.value, row.overall.predicted
        if predicted is not None and abs(measured / predicted - 1) > AGREEMENT:
            apart.append(f"nextn {row.nextn} {measured:.2f}x against {predicted:.2f}x")
    said = f"measured and predicted speedup are more than {100 * AGREEMENT:.0f} % apart: "
    said += f"{', '.join(apart)}. Repeat it on a quiet machine, with more requests."
    return said if apart else None


def kinds_apart(drafting: Sequence[Row], best: Row) -> str:
    """Name the kinds of prompts for which another nextn is fastest."""
    found = []
    for kind in best.kinds:
        row = max(drafting, key=lambda row: row.kinds[kind].speedup.value)
        if row.nextn != best.nextn and kind != ALL:
            found.append(f"{kind}: nextn {row.nextn}, {row.kinds[kind].speedup.value:.2f}x")
    return f" ({'; '.join(found)})" if found else ""
