"""The arithmetic of an evaluation: shares of correct answers with their 95 % intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from mtpbuild.builder.bench.figures import ALL, Ratio, decode, merged, resampled, speedup
from mtpbuild.builder.eval.problems import Answered

Z = 1.959964  # of a two-sided 95 % interval


@dataclass(frozen=True, slots=True)
class Difference:
    """The accuracy minus that of strict acceptance, on the same problems."""

    value: float
    low: float  # of the 95 % interval, by resampling the problems
    high: float
    lost: int  # correct under strict alone
    gained: int  # correct under this setting alone
    p_value: float  # McNemar's exact test of whether lost and gained differ


@dataclass(frozen=True, slots=True)
class Figures:
    """A setting's figures over the problems of one form or over all; the keys of eval.json."""

    problems_asked: int
    right: int
    accuracy: float
    accuracy_interval: tuple[float, float]
    against_strict: Difference
    spec_decode_acceptance_length: float
    total_output_tokens: int
    user_tokens_per_s: float  # after each request's first token
    speedup_over_strict: Ratio  # of user_tokens_per_s


@dataclass(frozen=True, slots=True)
class Row:
    """All figures of one setting."""

    name: str
    forms: dict[str, Figures]  # ALL first

    @property
    def overall(self) -> Figures:
        return self.forms[ALL]


def rows(answered: dict[str, list[Answered]]) -> list[Row]:
    """Compute a row per setting; the first one is strict."""
    strict, *_ = answered.values()
    forms = dict.fromkeys([ALL, *(a.problem.prompt.kind for a in strict)])

    def of_form(answers: Sequence[Answered], form: str) -> list[Answered]:
        return [a for a in answers if form in (ALL, a.problem.prompt.kind)]

    return [
        Row(name, {form: figures_of(of_form(mine, form), of_form(strict, form)) for form in forms})
        for name, mine in answered.items()
    ]


def figures_of(mine: Sequence[Answered], strict: Sequence[Answered]) -> Figures:
    groups, base = [[a.sample] for a in mine], [[a.sample] for a in strict]
    drafting = merged([a.sample.drafting for a in mine if a.sample.drafting is not None])
    tokens, seconds = decode(groups)
    count, right = len(mine), sum(a.right for a in mine)
    return Figures(
        problems_asked=count,
        right=right,
        accuracy=right / count,
        accuracy_interval=wilson(right, count),
        against_strict=difference([a.right for a in mine], [a.right for a in strict]),
        spec_decode_acceptance_length=drafting.mean_acceptance_length or 0.0,
        total_output_tokens=sum(len(a.sample.token_ids) for a in mine),
        user_tokens_per_s=tokens / seconds if seconds else 0.0,
        speedup_over_strict=speedup(groups, base),
    )


def wilson(right: int, n: int) -> tuple[float, float]:
    """Compute Wilson's interval of the share `right` of `n`."""
    p = right / n
    middle = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def difference(mine: Sequence[bool], strict: Sequence[bool]) -> Difference:
    pairs = list(zip(mine, strict, strict=True))
    lost, gained = pairs.count((False, True)), pairs.count((True, False))
    each = [a - b for a, b in pairs]
    low, high = resampled(each, fmean)
    return Difference(fmean(each), low, high, lost, gained, mcnemar(lost, gained))


def mcnemar(lost: int, gained: int) -> float:
    """Return the probability of a split at least as uneven, if both sides are equally likely."""
    changed = lost + gained
    tail = sum(math.comb(changed, i) for i in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / 2**changed)
