"""The figures of an evaluation: as tables and a picture for people, and as JSON for programs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from mtpbuild.lab.eval.problems import GradedAnswer
from mtpbuild.lab.measure import statistics
from mtpbuild.lab.measure.statistics import ALL, Estimate
from mtpbuild.lab.show.pictures import Line, Panel, Picture, write_machine_note
from mtpbuild.runtime import Manifest
from mtpbuild.runtime.tables import Row, print_lines, print_table

Figures = dict[str, Any]  # of the problems of one form; keys of eval.json


@dataclass(frozen=True, slots=True)
class SettingRow:
    """All figures of one setting."""

    name: str
    forms: dict[str, Figures]  # ALL first
    problems: Sequence[Figures] = ()

    @property
    def overall(self) -> Figures:
        return self.forms[ALL]

    @property
    def speedup(self) -> Estimate:
        return Estimate(**self.overall["speedup_over_strict"])

    @property
    def accuracy(self) -> Estimate:
        """The percentage of right answers."""
        share, (low, high) = self.overall["accuracy"], self.overall["accuracy_interval"]
        return Estimate(100 * share, 100 * low, 100 * high)


def make_rows(graded: dict[str, list[GradedAnswer]]) -> list[SettingRow]:
    """Compute a row per setting; the first one is strict."""
    strict, *_ = graded.values()
    rows = []
    for name, answers in graded.items():
        pairs = list(zip(answers, strict, strict=True))
        forms = {
            form: compute_figures([p for p in pairs if form in (ALL, p[0].answer.prompt.kind)])
            for form in statistics.list_kinds(g.answer for g in strict)
        }
        rows.append(SettingRow(name, forms, [describe_problem(answer) for answer in answers]))
    return rows


def compute_figures(pairs: Sequence[tuple[GradedAnswer, GradedAnswer]]) -> Figures:
    """Compute the figures of a setting's answers, each with strict's to the same problem."""
    mine, strict = zip(*pairs, strict=True)
    answers = [graded.answer for graded in mine]
    groups, base = ([[graded.answer] for graded in side] for side in (mine, strict))
    tokens, seconds = statistics.count_decoded(groups)
    share = statistics.estimate_share(sum(graded.right for graded in mine), len(mine))
    return {
        "problems_asked": len(mine),
        "right": sum(graded.right for graded in mine),
        "accuracy": share.value,
        "accuracy_interval": share[1:],
        "against_strict": compare_accuracy([g.right for g in mine], [g.right for g in strict]),
        "spec_decode_acceptance_length": statistics.sum_drafting(answers).mean_acceptance_length
        or 0.0,
        "total_output_tokens": sum(len(answer.token_ids) for answer in answers),
        "user_tokens_per_s": tokens / seconds if seconds else 0.0,  # after the first token
        # of user_tokens_per_s
        "speedup_over_strict": statistics.compute_speedup(groups, base)._asdict(),
    }


def compare_accuracy(mine: Sequence[bool], strict: Sequence[bool]) -> Figures:
    """Compare the accuracy with that of strict acceptance, on the same problems."""
    pairs = list(zip(mine, strict, strict=True))
    lost, gained = pairs.count((False, True)), pairs.count((True, False))
    changes = [a - b for a, b in pairs]
    low, high = statistics.resample_interval(changes, fmean)
    return {
        "value": fmean(changes),
        **{"low": low, "high": high},  # the 95 % interval, by resampling the problems
        **{"lost": lost, "gained": gained},  # problems that strict alone, or `mine` alone, solves
        "p_value": compute_mcnemar_p_value(lost, gained),
    }


def compute_mcnemar_p_value(lost: int, gained: int) -> float:
    """Return the probability of a split at least as uneven, if both sides are equally likely.

    McNemar's exact test of whether lost and gained problems differ in number.
    """
    changed = lost + gained
    tail = sum(math.comb(changed, i) for i in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / 2**changed)


def describe_problem(graded: GradedAnswer) -> Figures:
    answer = graded.answer
    return {
        "task_id": answer.prompt.task_id,
        "form": answer.prompt.kind,
        "answer": graded.text,
        "right": graded.right,
        "output_tokens": len(answer.token_ids),
        "decode_ms": 1000 * (answer.times[-1] - answer.times[0]),
    }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of one run of `mtpbuild eval`."""

    engine: str
    manifest: Manifest
    machine: dict[str, Any]
    settings: dict[str, Any]
    rows: list[SettingRow]


def make_eval_json(report: Evaluation) -> dict[str, Any]:
    """Make the JSON that docs/eval.md describes."""
    return {
        "engine": report.engine,
        "model": report.manifest.model.name,
        "nextn": report.manifest.build.nextn,
        "drafter": report.manifest.build.drafter,
        "machine": report.machine,
        "settings": report.settings,
        "results": [
            {
                "setting": row.name,
                **row.overall,
                "forms": {form: row.forms[form] for form in row.forms if form != ALL},
                "problems": row.problems,
            }
            for row in report.rows
        ],
    }


def list_settings(rows: Sequence[SettingRow]) -> Iterator[Row]:
    """List the rows of a table with a line per setting, over all problems."""
    yield "accepted", "right", "95 %", "diff", "95 %", "p", "L", "tok/s", "speedup"
    for row in rows:
        right = row.accuracy
        d = row.overall["against_strict"]
        apart = f"{100 * d['value']:+.1f}", f"{100 * d['low']:+.0f} {100 * d['high']:+.0f}"
        compared = row is not rows[0]  # strict is not compared with itself
        yield (
            row.name,
            f"{right.value:.1f} %",
            f"{right.low:.0f}-{right.high:.0f}",
            *((*apart, f"{d['p_value']:.2f}") if compared else ("", "", "")),
            f"{row.overall['spec_decode_acceptance_length']:.2f}",
            f"{row.overall['user_tokens_per_s']:.0f}",
            f"{row.speedup.value:.2f} ({row.speedup.interval})" if compared else "",
        )


def write_conclusion(rows: Sequence[SettingRow]) -> str:
    """Write whether a setting's accuracy differs from strict's, and which setting is fastest."""
    strict, *others = rows
    count = strict.overall["problems_asked"]
    text = f"strict: {strict.overall['right']} of {count} {'problem' if count == 1 else 'problems'}"
    fastest = max(others, key=lambda row: row.speedup.value)
    ratio = fastest.speedup.value
    text += f"; fastest: {fastest.name}, {ratio:.2f}x" if ratio > 1 else "; none is faster"
    apart = [row.name for row in others if row.overall["against_strict"]["p_value"] < 0.05]
    if apart:
        return f"{text}. Other than strict's accuracy (p < 0.05): {', '.join(apart)}"
    return f"{text}. No setting's accuracy is seen to differ from strict's (p < 0.05)"


def print_evaluation(report: Evaluation) -> None:
    """Print a line per setting, the right answers and tokens per step by form, the conclusion."""
    build = report.manifest.build
    settings = report.settings
    print_lines(
        f"{report.manifest.model.name}, nextn {build.nextn}, {build.drafter}, "
        f"{settings['task']}: {settings['num_problems']} problems",
        style="bold",
    )
    print_table(list_settings(report.rows))
    _, *forms = report.rows[0].forms
    if len(forms) > 1:
        cell = "{right} / {spec_decode_acceptance_length:.2f}"
        rows = [(r.name, *(cell.format(**r.forms[form]) for form in forms)) for r in report.rows]
        print_table([("right / L", *forms), *rows])
    print_lines(write_conclusion(report.rows), style="bold")


def plot_evaluation(report: Evaluation) -> Picture:
    """Plot accuracy and speed of the settings, and one over the other, with 95 % intervals."""
    rows = report.rows
    manifest = report.manifest
    names = [row.name for row in rows]
    accuracies = [row.accuracy for row in rows]
    lengths = [f"{row.overall['spec_decode_acceptance_length']:.2f}" for row in rows]
    speeds = [row.overall["user_tokens_per_s"] for row in rows]
    right = "right answers, %"
    setting = "acceptance: strict, or relaxed top-k / delta"
    setting = setting if len(rows) > 2 else ""
    panels = [
        Panel(setting, right, [Line("", accuracies, look="o")], names),
        Panel(
            setting,
            "speedup over strict",
            [Line("", [row.speedup for row in rows], look="o", notes=lengths)],
            names,
        ),
        Panel("tokens/s per user", right, [Line("", accuracies, speeds, "o", names)]),
    ]
    title = (
        f"{manifest.model.name}, nextn {manifest.build.nextn}: "
        f"{report.settings['num_problems']} problems of {Path(report.settings['task']).stem}"
    )
    note = "95 % intervals; beside the speedups: acceptance length"
    return Picture(title, f"{note}; {write_machine_note(report.machine)}", panels, columns=3)
