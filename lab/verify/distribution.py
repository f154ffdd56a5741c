"""Comparison of sampled texts with a known distribution, by chi-square over their prefixes."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtpbuild.lab.measure.runs import TimedAnswer

EXPECTED = 5  # a cell with fewer expected texts is pooled with others

Prefix = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChiSquareFit:
    """The fit of counts to their expectation."""

    statistic: float
    freedom: int
    # The most surprising prefix, its count, and the expected count.
    worst: tuple[Prefix, int, float]


def compute_prefix_probabilities(texts: Sequence[TimedAnswer]) -> dict[Prefix, float]:
    """Return each prefix's exact probability at temperature 1, without filters."""
    known: dict[Prefix, float] = {}
    for text in texts:
        total = 0.0
        for i, logprob in enumerate(text.logprobs):
            total += logprob
            known[tuple(text.token_ids[: i + 1])] = math.exp(total)
    return known


def fit_prefixes(texts: Sequence[Sequence[int]], known: Mapping[Prefix, float]) -> ChiSquareFit:
    """Count each text under its longest prefix that is likely enough, and compare the counts.

    `known` may be incomplete: a text with an unknown prefix counts under the known part of it.
    """
    count = len(texts)
    likely = {(): 1.0} | {prefix: p for prefix, p in known.items() if p * count >= EXPECTED}
    share = dict(likely)  # probability that a prefix is a text's longest likely one
    for prefix, p in likely.items():
        if prefix:
            share[prefix[:-1]] -= p
    observed = Counter(_find_longest_prefix(text, likely) for text in texts)
    groups = _pool_cells({prefix: p * count for prefix, p in share.items()})
    counts = [sum(observed[prefix] for prefix in group) for group, _ in groups]
    statistic = sum((n - e) ** 2 / e for n, (_, e) in zip(counts, groups, strict=True))
    seen = Counter(tuple(text[:length]) for text in texts for length in range(len(text) + 1))

    def compute_surprise(prefix: Prefix) -> float:
        expected = likely[prefix] * count
        return (seen[prefix] - expected) ** 2 / expected

    worst = max(likely, key=compute_surprise)
    return ChiSquareFit(statistic, len(groups) - 1, (worst, seen[worst], likely[worst] * count))


def compute_chi_square_p_value(statistic: float, freedom: int) -> float:
    """Compute P(chi-square >= statistic) for `freedom` degrees of freedom, by its finite sums."""
    if statistic <= 0:
        return 1.0
    y = statistic / 2
    odd = freedom % 2
    total = math.erfc(math.sqrt(y)) if odd else 0.0
    for i in range(freedom // 2):
        power = i + odd / 2
        total += math.exp(power * math.log(y) - y - math.lgamma(power + 1))
    return min(total, 1.0)


def _find_longest_prefix(text: Sequence[int], likely: Mapping[Prefix, float]) -> Prefix:
    return next(prefix for n in range(len(text), -1, -1) if (prefix := tuple(text[:n])) in likely)


def _pool_cells(expected: Mapping[Prefix, float]) -> list[tuple[list[Prefix], float]]:
    """Pool cells into groups of at least `EXPECTED` texts; the rest joins the last group."""
    groups: list[tuple[list[Prefix], float]] = []
    rare: list[Prefix] = []
    for prefix in sorted(expected, key=lambda prefix: expected[prefix]):
        rare.append(prefix)
        total = math.fsum(expected[p] for p in rare)
        if total >= EXPECTED:
            groups.append((rare, total))
            rare = []
    if rare:
        last = groups.pop() if groups else ([], 0.0)
        groups.append((last[0] + rare, last[1] + math.fsum(expected[p] for p in rare)))
    return groups
