"""An evaluation as tables for people and as one JSON object for machines."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from mtpbuild.builder.bench.figures import ALL
from mtpbuild.builder.eval.figures import Figures, Row
from mtpbuild.builder.eval.measure import Answered
from mtpbuild.builder.tables import figures_table, say
from mtpbuild.runtime import Manifest


@dataclass(frozen=True, slots=True)
class Report:
    """Holds all that a run of `mtpbuild eval` found out."""

    engine: str
    manifest: Manifest
    machine: dict[str, Any]
    settings: dict[str, Any]
    rows: list[Row]
    answered: dict[str, list[Answered]]


def to_json(report: Report) -> dict[str, Any]:
    """docs/eval.md describes it."""
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
                **keys(row.overall),
                "forms": {form: keys(f) for form, f in row.forms.items() if form != ALL},
                "problems": [
                    {
                        "task_id": a.problem.prompt.task_id,
                        "form": a.problem.prompt.kind,
                        "answer": a.answer,
                        "right": a.right,
                        "output_tokens": len(a.sample.token_ids),
                        "decode_ms": 1000 * (a.sample.times[-1] - a.sample.times[0]),
                    }
                    for a in report.answered[row.name]
                ],
            }
            for row in report.rows
        ],
    }


def keys(f: Figures) -> dict[str, Any]:
    """The figures of one setting and form."""
    return {
        "problems_asked": f.accuracy.problems,
        "right": f.accuracy.right,
        "accuracy": f.accuracy.value,
        "accuracy_interval": list(f.accuracy.interval),
        "against_strict": asdict(f.against_strict),
        "spec_decode_acceptance_length": f.acceptance_length,
        "total_output_tokens": f.output_tokens,
        "user_tokens_per_s": f.tokens_per_s,
        "speedup_over_strict": asdict(f.speedup),
    }


def table(rows: Sequence[Row]) -> Table:
    """A line per setting, over all problems."""
    columns = ("right", "95 %", "diff", "95 %", "p", "L", "tok/s", "speedup")
    result = figures_table("accepted", columns)
    for row in rows:
        f, strict = row.overall, row is rows[0]
        low, high = f.accuracy.interval
        d = f.against_strict
        result.add_row(
            row.name,
            f"{100 * f.accuracy.value:.1f} %",
            f"{100 * low:.0f}-{100 * high:.0f}",
            "" if strict else f"{100 * d.value:+.1f}",
            "" if strict else f"{100 * d.low:+.0f} {100 * d.high:+.0f}",
            "" if strict else f"{d.p_value:.2f}",
            f"{f.acceptance_length:.2f}",
            f"{f.tokens_per_s:.0f}",
            "" if strict else f"{f.speedup.value:.2f} ({f.speedup.interval})",
        )
    return result


def forms_table(rows: Sequence[Row]) -> Table:
    """Right answers per form, and the tokens per step."""
    forms = [form for form in rows[0].forms if form != ALL]
    result = figures_table("right / L", forms)
    for row in rows:
        found = [row.forms[form] for form in forms]
        cells = (f"{f.accuracy.right} / {f.acceptance_length:.2f}" for f in found)
        result.add_row(row.name, *cells)
    return result


def conclusion(rows: Sequence[Row]) -> str:
    """Says whether anything is seen to cost answers, and what is fastest."""
    strict, *others = rows
    named = "problem" if strict.overall.accuracy.problems == 1 else "problems"
    said = f"strict: {strict.overall.accuracy.right} of {strict.overall.accuracy.problems} {named}"
    fastest = max(others, key=lambda row: row.overall.speedup.value)
    said += f"; fastest: {fastest.name}, {fastest.overall.speedup.value:.2f}x"
    apart = [row.name for row in others if row.overall.against_strict.p_value < 0.05]
    if apart:
        return f"{said}. Other than strict's accuracy (p < 0.05): {', '.join(apart)}"
    return f"{said}. No setting's accuracy is seen to differ from strict's (p < 0.05)"


def print_report(report: Report) -> None:
    build, settings = report.manifest.build, report.settings
    say(
        f"{report.manifest.model.name}, nextn {build.nextn}, {build.drafter}, "
        f"{settings['task']}: {settings['num_problems']} problems",
        style="bold",
    )
    say(table(report.rows), forms_table(report.rows) if len(report.rows[0].forms) > 2 else None)
    say(conclusion(report.rows), style="bold")
