"""Statistics of answers: rates, ratios and their 95 % intervals. Times are in seconds."""

import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from mtpbuild.lab.measure.runs import TimedAnswer
from mtpbuild.runtime.requests.stats import AcceptanceCounter, SpeculativeDecoding

ALL = "all"  # the kind of prompts that stands for every kind
RESAMPLES = 1000
PERCENTILES = (50, 90, 99)
Z = 1.959964  # of a two-sided 95 % interval
T = TypeVar("T")
Groups = Sequence[Sequence[TimedAnswer]]  # the answers of each group ran at once


class Estimate(NamedTuple):
    """A figure with its 95 % interval."""

    value: float
    low: float | None  # None if there was only one group of requests to resample
    high: float | None

    @property
    def interval(self) -> str:
        return "-" if self.low is None else f"{self.low:.2f}-{self.high:.2f}"


def select_kind(groups: Groups, kind: str) -> Groups:
    return [group for group in groups if kind in (ALL, group[0].prompt.kind)]


def list_kinds(answers: Iterable[TimedAnswer]) -> list[str]:
    """List `ALL` and the kinds of the prompts."""
    return list(dict.fromkeys([ALL, *(answer.prompt.kind for answer in answers)]))


def count_decoded(groups: Groups) -> tuple[int, float]:
    """Count the tokens after each request's first one, and the seconds that they took."""
    answers = [answer for group in groups for answer in group]
    tokens = sum(len(answer.token_ids) - 1 for answer in answers)
    return tokens, math.fsum(answer.times[-1] - answer.times[0] for answer in answers)


def compute_speedup(groups: Groups, base: Groups) -> Estimate:
    """Compute the ratio of one user's tokens/s to the base's; its interval is by resampling."""
    pairs = zip(groups, base, strict=True)
    parts = [(*count_decoded([g]), *count_decoded([b])) for g, b in pairs]

    def ratio(drawn: Sequence[tuple[int, float, int, float]]) -> float | None:  # of resampled pairs
        tokens, seconds, base_tokens, base_seconds = map(sum, zip(*drawn, strict=True))
        divisor = seconds * base_tokens
        return tokens * base_seconds / divisor if divisor else None

    interval = resample_interval(parts, ratio) if len(parts) > 1 else (None, None)
    return Estimate(ratio(parts) or 0.0, *interval)


def resample_interval(
    items: Sequence[T], figure: Callable[[Sequence[T]], float | None]
) -> list[float]:
    """Resample the items; return both ends of the figure's 95 % interval."""
    rng = random.Random(0)
    drawn = [figure(rng.choices(items, k=len(items))) for _ in range(RESAMPLES)]
    known = [value for value in drawn if value is not None]
    return [compute_percentile(known, 2.5), compute_percentile(known, 97.5)]


def compute_percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def summarise(values: Sequence[float]) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles by name."""
    return {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "std": statistics.pstdev(values),
        **{f"p{percent}": compute_percentile(values, percent) for percent in PERCENTILES},
    }


def estimate_share(count: int, n: int) -> Estimate:
    """Return the share `count` of `n` with Wilson's 95 % interval."""
    p = count / n
    middle = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
    return Estimate(p, max(0.0, middle - half), min(1.0, middle + half))


def sum_drafting(answers: Sequence[TimedAnswer]) -> SpeculativeDecoding:
    """Add up the drafting statistics of several requests."""
    reports = [answer.drafting for answer in answers]
    total = AcceptanceCounter(reports[0].num_spec_tokens)
    total.tokens = sum(len(answer.token_ids) for answer in answers)
    for report in reports:
        total.drafted += report.num_draft_tokens
        for accepted, steps in enumerate(report.acceptance_histogram):
            total.histogram[accepted] += steps
    return total.report()
