"""The arithmetic of an evaluation: shares of correct answers with their 95 % intervals."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from mtpbuild.builder.eval.problems import GradedAnswer
from mtpbuild.builder.measure.statistics import (
    ALL,
    Estimate,
    count_decoded,
    estimate_share,
    kinds_of,
    resampled_interval,
    speedup,
    sum_drafting,
)

Figures = dict[str, Any]  # of the problems of one form; keys of eval.json


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
class Row:
    """All figures of one setting."""

    name: str
    forms: dict[str, Figures]  # ALL first

    @property
    def overall(self) -> Figures:
        return self.forms[ALL]

    @property
    def speedup(self) -> Estimate:
        return Estimate(**self.overall["speedup_over_strict"])


def rows(graded: dict[str, list[GradedAnswer]]) -> list[Row]:
    """Compute a row per setting; the first one is strict."""
    strict, *_ = graded.values()
    forms = kinds_of(g.answer for g in strict)

    def of_form(answers: Sequence[GradedAnswer], form: str) -> list[GradedAnswer]:
        return [g for g in answers if form in (ALL, g.answer.prompt.kind)]

    return [
        Row(name, {form: figures_of(of_form(mine, form), of_form(strict, form)) for form in forms})
        for name, mine in graded.items()
    ]


def figures_of(mine: Sequence[GradedAnswer], strict: Sequence[GradedAnswer]) -> Figures:
    answers, base = [g.answer for g in mine], [[g.answer] for g in strict]
    groups = [[answer] for answer in answers]
    tokens, seconds = count_decoded(groups)
    count, right = len(mine), sum(g.right for g in mine)
    share = estimate_share(right, count)
    return {
        "problems_asked": count,
        "right": right,
        "accuracy": share.value,
        "accuracy_interval": share[1:],
        "against_strict": asdict(difference([g.right for g in mine], [g.right for g in strict])),
        "spec_decode_acceptance_length": sum_drafting(answers).mean_acceptance_length or 0.0,
        "total_output_tokens": sum(len(answer.token_ids) for answer in answers),
        "user_tokens_per_s": tokens / seconds if seconds else 0.0,  # after the first token
        "speedup_over_strict": speedup(groups, base)._asdict(),  # of user_tokens_per_s
    }


def difference(mine: Sequence[bool], strict: Sequence[bool]) -> Difference:
    pairs = list(zip(mine, strict, strict=True))
    lost, gained = pairs.count((False, True)), pairs.count((True, False))
    each = [a - b for a, b in pairs]
    low, high = resampled_interval(each, fmean)
    return Difference(fmean(each), low, high, lost, gained, mcnemar(lost, gained))


def mcnemar(lost: int, gained: int) -> float:
    """Return the probability of a split at least as uneven, if both sides are equally likely."""
    changed = lost + gained
    tail = sum(math.comb(changed, i) for i in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / 2**changed)
