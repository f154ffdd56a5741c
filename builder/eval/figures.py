"""The arithmetic of an evaluation: shares of correct answers with their 95 % intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from mtpbuild.builder.eval.problems import GradedAnswer
from mtpbuild.builder.measure import statistics

Figures = dict[str, Any]  # of the problems of one form; keys of eval.json


@dataclass(frozen=True, slots=True)
class SettingRow:
    """All figures of one setting."""

    name: str
    forms: dict[str, Figures]  # ALL first

    @property
    def overall(self) -> Figures:
        return self.forms[statistics.ALL]

    @property
    def speedup(self) -> statistics.Estimate:
        return statistics.Estimate(**self.overall["speedup_over_strict"])


def make_rows(graded: dict[str, list[GradedAnswer]]) -> list[SettingRow]:
    """Compute a row per setting; the first one is strict."""
    strict, *_ = graded.values()
    forms = statistics.list_kinds(g.answer for g in strict)

    def of_form(answers: Sequence[GradedAnswer], form: str) -> list[GradedAnswer]:
        return [g for g in answers if form in (statistics.ALL, g.answer.prompt.kind)]

    return [
        SettingRow(
            name,
            {form: compute_figures(of_form(mine, form), of_form(strict, form)) for form in forms},
        )
        for name, mine in graded.items()
    ]


def compute_figures(mine: Sequence[GradedAnswer], strict: Sequence[GradedAnswer]) -> Figures:
    answers, base = [g.answer for g in mine], [[g.answer] for g in strict]
    groups = [[answer] for answer in answers]
    tokens, seconds = statistics.count_decoded(groups)
    drafting, speedup = statistics.sum_drafting(answers), statistics.compute_speedup(groups, base)
    count, right = len(mine), sum(g.right for g in mine)
    share = statistics.estimate_share(right, count)
    return {
        "problems_asked": count,
        "right": right,
        "accuracy": share.value,
        "accuracy_interval": share[1:],
        "against_strict": compare_accuracy([g.right for g in mine], [g.right for g in strict]),
        "spec_decode_acceptance_length": drafting.mean_acceptance_length or 0.0,
        "total_output_tokens": sum(len(answer.token_ids) for answer in answers),
        "user_tokens_per_s": tokens / seconds if seconds else 0.0,  # after the first token
        "speedup_over_strict": speedup._asdict(),  # of user_tokens_per_s
    }


def compare_accuracy(mine: Sequence[bool], strict: Sequence[bool]) -> Figures:
    """Compare the accuracy with that of strict acceptance, on the same problems."""
    pairs = list(zip(mine, strict, strict=True))
    lost, gained = pairs.count((False, True)), pairs.count((True, False))
    each = [a - b for a, b in pairs]
    low, high = statistics.resample_interval(each, fmean)
    return {
        "value": fmean(each),
        **{"low": low, "high": high},  # the 95 % interval, by resampling the problems
        **{"lost": lost, "gained": gained},  # correct under one of the two alone
        "p_value": mcnemar_p_value(lost, gained),  # McNemar's exact test: do lost and gained differ
    }


def mcnemar_p_value(lost: int, gained: int) -> float:
    """Return the probability of a split at least as uneven, if both sides are equally likely."""
    changed = lost + gained
    tail = sum(math.comb(changed, i) for i in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / 2**changed)
