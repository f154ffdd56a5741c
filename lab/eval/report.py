"""The figures of an evaluation: as tables and a picture for people, and as JSON for programs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.table import Table

from mtpbuild.lab.eval.problems import GradedAnswer
from mtpbuild.lab.measure import statistics
from mtpbuild.lab.measure.statistics import ALL, Estimate
from mtpbuild.lab.show.pictures import (
    COLOURS,
    GREY,
    compute_error_bar_lengths,
    draw_panels,
    label_x,
    write_above,
    write_machine_note,
)
from mtpbuild.lab.show.results import write_results
from mtpbuild.lab.show.tables import make_figures_table, print_lines
from mtpbuild.runtime import Manifest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARE = "right answers, %"
Figures = dict[str, Any]  # of the problems of one form; keys of eval.json


@dataclass(frozen=True, slots=True)
class SettingRow:
    """All figures of one setting."""

    name: str
    forms: dict[str, Figures]  # ALL first

    @property
    def overall(self) -> Figures:
        return self.forms[ALL]

    @property
    def speedup(self) -> Estimate:
        return Estimate(**self.overall["speedup_over_strict"])


def make_rows(graded: dict[str, list[GradedAnswer]]) -> list[SettingRow]:
    """Compute a row per setting; the first one is strict."""
    strict, *_ = graded.values()
    forms = statistics.list_kinds(g.answer for g in strict)

    def select_form(answers: Sequence[GradedAnswer], form: str) -> list[GradedAnswer]:
        return [g for g in answers if form in (ALL, g.answer.prompt.kind)]

    return [
        SettingRow(
            name,
            {
                form: compute_figures(select_form(mine, form), select_form(strict, form))
                for form in forms
            },
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
        **{"lost": lost, "gained": gained},  # problems that strict alone, or `mine` alone, solves
        "p_value": compute_mcnemar_p_value(
            lost, gained
        ),  # McNemar's exact test: do lost and gained differ
    }


def compute_mcnemar_p_value(lost: int, gained: int) -> float:
    """Return the probability of a split at least as uneven, if both sides are equally likely."""
    changed = lost + gained
    tail = sum(math.comb(changed, i) for i in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / 2**changed)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of one run of `mtpbuild eval`."""

    engine: str
    manifest: Manifest
    machine: dict[str, Any]
    settings: dict[str, Any]
    rows: list[SettingRow]
    graded: dict[str, list[GradedAnswer]]


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
                "forms": {form: f for form, f in row.forms.items() if form != ALL},
                "problems": [
                    {
                        "task_id": g.answer.prompt.task_id,
                        "form": g.answer.prompt.kind,
                        "answer": g.text,
                        "right": g.right,
                        "output_tokens": len(g.answer.token_ids),
                        "decode_ms": 1000 * (g.answer.times[-1] - g.answer.times[0]),
                    }
                    for g in report.graded[row.name]
                ],
            }
            for row in report.rows
        ],
    }


def make_table(rows: Sequence[SettingRow]) -> Table:
    """Make a table with a line per setting, over all problems."""
    columns = ("right", "95 %", "diff", "95 %", "p", "L", "tok/s", "speedup")
    result = make_figures_table("accepted", columns)
    for row in rows:
        f, strict = row.overall, row is rows[0]
        low, high = f["accuracy_interval"]
        d = f["against_strict"]
        apart = (f"{100 * d['value']:+.1f}", f"{100 * d['low']:+.0f} {100 * d['high']:+.0f}")
        result.add_row(
            row.name,
            f"{100 * f['accuracy']:.1f} %",
            f"{100 * low:.0f}-{100 * high:.0f}",
            *(("", "", "") if strict else (*apart, f"{d['p_value']:.2f}")),
            f"{f['spec_decode_acceptance_length']:.2f}",
            f"{f['user_tokens_per_s']:.0f}",
            "" if strict else f"{row.speedup.value:.2f} ({row.speedup.interval})",
        )
    return result


def make_forms_table(rows: Sequence[SettingRow]) -> Table:
    """Make a table of correct answers and tokens per step, by form."""
    forms = [form for form in rows[0].forms if form != ALL]
    result = make_figures_table("right / L", forms)
    for row in rows:
        cell = "{right} / {spec_decode_acceptance_length:.2f}"
        result.add_row(row.name, *(cell.format(**row.forms[form]) for form in forms))
    return result


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
    build, settings = report.manifest.build, report.settings
    print_lines(
        f"{report.manifest.model.name}, nextn {build.nextn}, {build.drafter}, "
        f"{settings['task']}: {settings['num_problems']} problems",
        style="bold",
    )
    print_lines(
        make_table(report.rows),
        make_forms_table(report.rows) if len(report.rows[0].forms) > 2 else None,
    )
    print_lines(write_conclusion(report.rows), style="bold")


def draw_evaluation(report: Evaluation, path: Path) -> None:
    """Draw accuracy and speed of the settings, and one over the other, with 95 % intervals."""
    rows, build = report.rows, report.manifest.build
    ratios = [row.speedup for row in rows]
    note = "95 % intervals; above the speedups: acceptance length"
    with draw_panels(path, f"{note}; {write_machine_note(report.machine)}", 3) as (figure, drawn):
        left, middle, right = drawn
        draw_points(left, estimate_accuracies(rows), COLOURS[0])
        left.set_ylabel(SHARE)
        draw_points(middle, ratios, COLOURS[1])
        middle.set_ylabel("speedup over strict")
        for place, (row, ratio) in enumerate(zip(rows, ratios, strict=True)):
            length = row.overall["spec_decode_acceptance_length"]
            write_above(middle, f"{length:.2f}", place, ratio.high or ratio.value)
        for axes in (left, middle):
            name = "acceptance: strict, or relaxed top-k / delta" if len(rows) > 2 else ""
            label_x(axes, name, [row.name for row in rows], rotation=45)
            axes.margins(y=0.15)
        draw_accuracy_over_speed(right, rows)
        figure.suptitle(
            f"{report.manifest.model.name}, nextn {build.nextn}: "
            f"{report.settings['num_problems']} problems of {Path(report.settings['task']).stem}"
        )


def estimate_accuracies(rows: Sequence[SettingRow]) -> list[Estimate]:
    """Return each setting's percentage of right answers."""
    found = ((row.overall["accuracy"], *row.overall["accuracy_interval"]) for row in rows)
    return [Estimate(*(100 * value for value in each)) for each in found]


def draw_points(axes: "Axes", points: Sequence[Estimate], colour: str) -> None:
    """Draw each setting's value and interval, and a line at strict's value."""
    values = [point.value for point in points]
    axes.errorbar(
        range(len(points)),
        values,
        compute_error_bar_lengths(points),
        fmt="o",
        color=colour,
        capsize=3,
    )
    axes.axhline(values[0], color=GREY, linewidth=0.8)


def draw_accuracy_over_speed(axes: "Axes", rows: Sequence[SettingRow]) -> None:
    """Draw each setting's accuracy over its speed; points above and to the right are better."""
    points, speeds = estimate_accuracies(rows), [row.overall["user_tokens_per_s"] for row in rows]
    values = [point.value for point in points]
    axes.errorbar(
        speeds, values, compute_error_bar_lengths(points), fmt="o", color=COLOURS[2], elinewidth=0.5
    )
    for row, speed, value in zip(rows, speeds, values, strict=True):
        write_above(axes, row.name, speed, value, rotation=60, ha="left")
    axes.margins(y=0.2)
    axes.set_xlabel("tokens/s per user")
    axes.set_ylabel(SHARE)


def write_evaluation(report: Evaluation, out: Path) -> None:
    """Write the figures as JSON and CSV."""
    write_results(out, "eval", make_eval_json(report), list_csv_rows(report))


def list_csv_rows(report: Evaluation) -> Iterator[dict[str, Any]]:
    """List the CSV's rows: the figures of each setting and form."""
    for row in report.rows:
        for form, figures in row.forms.items():
            yield {"setting": row.name, "form": form, **figures}
