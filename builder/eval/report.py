"""An evaluation as tables and a picture for people, and as JSON for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from mtpbuild.builder.bench.figures import ALL
from mtpbuild.builder.eval.figures import Row
from mtpbuild.builder.eval.problems import Answered
from mtpbuild.builder.show.picture import COLOURS, GREY, label_x, panels, spans, write_above
from mtpbuild.builder.show.tables import figures_table, say
from mtpbuild.runtime import Manifest

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of one run of `mtpbuild eval`."""

    engine: str
    manifest: Manifest
    machine: dict[str, Any]
    settings: dict[str, Any]
    rows: list[Row]
    answered: dict[str, list[Answered]]


def to_json(report: Evaluation) -> dict[str, Any]:
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
                **asdict(row.overall),
                "forms": {form: asdict(f) for form, f in row.forms.items() if form != ALL},
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


def table(rows: Sequence[Row]) -> Table:
    """Make a table with a line per setting, over all problems."""
    columns = ("right", "95 %", "diff", "95 %", "p", "L", "tok/s", "speedup")
    result = figures_table("accepted", columns)
    for row in rows:
        f, strict = row.overall, row is rows[0]
        low, high = f.accuracy_interval
        d, speedup = f.against_strict, f.speedup_over_strict
        apart = (f"{100 * d.value:+.1f}", f"{100 * d.low:+.0f} {100 * d.high:+.0f}")
        result.add_row(
            row.name,
            f"{100 * f.accuracy:.1f} %",
            f"{100 * low:.0f}-{100 * high:.0f}",
            *(("", "", "") if strict else (*apart, f"{d.p_value:.2f}")),
            f"{f.spec_decode_acceptance_length:.2f}",
            f"{f.user_tokens_per_s:.0f}",
            "" if strict else f"{speedup.value:.2f} ({speedup.interval})",
        )
    return result


def forms_table(rows: Sequence[Row]) -> Table:
    """Make a table of correct answers and tokens per step, by form."""
    forms = [form for form in rows[0].forms if form != ALL]
    result = figures_table("right / L", forms)
    for row in rows:
        found = (row.forms[form] for form in forms)
        cells = (f"{f.right} / {f.spec_decode_acceptance_length:.2f}" for f in found)
        result.add_row(row.name, *cells)
    return result


def conclusion(rows: Sequence[Row]) -> str:
    """Write whether a setting's accuracy differs from strict's, and which setting is fastest."""
    strict, *others = rows
    count = strict.overall.problems_asked
    said = f"strict: {strict.overall.right} of {count} {'problem' if count == 1 else 'problems'}"
    fastest = max(others, key=lambda row: row.overall.speedup_over_strict.value)
    ratio = fastest.overall.speedup_over_strict.value
    said += f"; fastest: {fastest.name}, {ratio:.2f}x" if ratio > 1 else "; none is faster"
    apart = [row.name for row in others if row.overall.against_strict.p_value < 0.05]
    if apart:
        return f"{said}. Other than strict's accuracy (p < 0.05): {', '.join(apart)}"
    return f"{said}. No setting's accuracy is seen to differ from strict's (p < 0.05)"


def print_report(report: Evaluation) -> None:
    build, settings = report.manifest.build, report.settings
    say(
        f"{report.manifest.model.name}, nextn {build.nextn}, {build.drafter}, "
        f"{settings['task']}: {settings['num_problems']} problems",
        style="bold",
    )
    say(table(report.rows), forms_table(report.rows) if len(report.rows[0].forms) > 2 else None)
    say(conclusion(report.rows), style="bold")


def draw(report: Evaluation, path: Path) -> None:
    """Draw accuracy and speed of the settings, and one over the other, with 95 % intervals."""
    found, m = [row.overall for row in report.rows], report.machine
    note = "95 % intervals; above the speedups: acceptance length"
    with panels(path, f"{note}; {m['cpu']}, {m['cores']} cores; {m['command']}", 3) as drawn:
        figure, (left, right, both) = drawn
        shares = [(f.accuracy, *f.accuracy_interval) for f in found]
        draw_points(left, [(100 * p, 100 * low, 100 * high) for p, low, high in shares], COLOURS[0])
        left.set_ylabel("right answers, %")
        ratios = [f.speedup_over_strict for f in found]
        speeds = [(r.value, r.low or r.value, r.high or r.value) for r in ratios]
        draw_points(right, speeds, COLOURS[1])
        right.set_ylabel("speedup over strict")
        for place, (f, speed) in enumerate(zip(found, speeds, strict=True)):
            write_above(right, f"{f.spec_decode_acceptance_length:.2f}", place, speed[2])
        for axes in (left, right):
            name = "acceptance: strict, or relaxed top-k / delta" if len(found) > 2 else ""
            label_x(axes, name, [row.name for row in report.rows], rotation=45)
            axes.margins(y=0.15)
        draw_trade(both, report.rows)
        figure.suptitle(
            f"{report.manifest.model.name}, nextn {report.manifest.build.nextn}: "
            f"{report.settings['num_problems']} problems of {Path(report.settings['task']).stem}"
        )


def draw_points(axes: "Axes", points: list[tuple[float, float, float]], colour: str) -> None:
    """Draw each setting's (value, low, high), and a line at strict's value."""
    values = [value for value, *_ in points]
    axes.errorbar(range(len(points)), values, spans(points), fmt="o", color=colour, capsize=3)
    axes.axhline(values[0], color=GREY, linewidth=0.8)


def draw_trade(axes: "Axes", rows: Sequence[Row]) -> None:
    """Draw each setting's accuracy over its speed; points above and to the right are better."""
    found = [row.overall for row in rows]
    speeds = [f.user_tokens_per_s for f in found]
    shares = [(f.accuracy, *f.accuracy_interval) for f in found]
    points = [(100 * p, 100 * low, 100 * high) for p, low, high in shares]
    values = [value for value, *_ in points]
    axes.errorbar(speeds, values, spans(points), fmt="o", color=COLOURS[2], elinewidth=0.5)
    for row, *point in zip(rows, speeds, values, strict=True):
        write_above(axes, row.name, *point, rotation=60, ha="left")
    axes.margins(y=0.2)
    axes.set_xlabel("tokens/s per user")
    axes.set_ylabel("right answers, %")


def to_rows(report: Evaluation) -> Iterator[dict[str, Any]]:
    """List a table's rows: the figures of each setting and form."""
    for row in report.rows:
        for form, figures in row.forms.items():
            yield {"setting": row.name, "form": form, **asdict(figures)}
