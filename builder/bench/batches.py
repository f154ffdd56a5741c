"""Several concurrencies side by side: tokens/s of all users and of one, by nextn."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from mtpbuild.builder.bench.figures import Figures, recommendation
from mtpbuild.builder.bench.report import Report, differs, machine_line, to_json
from mtpbuild.builder.picture import COLOURS, label_x, panels, share_legend
from mtpbuild.builder.tables import figures_table, say

PANELS: dict[str, Callable[[Figures], float]] = {
    "tokens/s of all users": lambda f: f.throughput,
    "tokens/s per user": lambda f: f.tokens_per_s,
}


def to_batches_json(reports: Sequence[Report]) -> dict[str, Any]:
    """docs/bench.md describes it; `runs` has what a single concurrency would have given."""
    return {
        "batches": [
            {
                "concurrency": report.settings["concurrency"],
                "nextn": row.nextn,
                "output_throughput": row.overall.throughput,
                "user_tokens_per_s": row.overall.tokens_per_s,
                "speedup": asdict(row.overall.speedup),
            }
            for report in reports
            for row in report.rows
        ],
        "runs": [to_json(report) for report in reports],
    }


def table(reports: Sequence[Report], name: str) -> Table:
    """Makes a table with one line per concurrency and one column per nextn."""
    result = figures_table(name, (f"nextn {row.nextn}" for row in reports[0].rows))
    for report in reports:
        cells = (f"{PANELS[name](row.overall):.1f}" for row in report.rows)
        result.add_row(f"concurrency {report.settings['concurrency']}", *cells)
    return result


def print_batches(reports: Sequence[Report]) -> None:
    """Both tables, the machine, and what to choose at each concurrency."""
    first = reports[0]
    say(f"\n{first.model}: {first.settings['num_requests']} requests", style="bold")
    say(*(table(reports, name) for name in PANELS))
    say(differs(first.settings), f"\n{machine_line(first.machine)}")
    for report in reports:
        best = recommendation(report.rows)[1]
        say(f"concurrency {report.settings['concurrency']}: {best}", style="bold")


def draw_batches(reports: Sequence[Report], path: Path, note: str) -> None:
    """A line per nextn against the concurrency; note: what was measured on, in small print."""
    sizes = [report.settings["concurrency"] for report in reports]
    with panels(path, note) as (figure, *both):
        for axes, (name, figure_of) in zip(both, PANELS.items(), strict=True):
            for i, row in enumerate(reports[0].rows):
                values = [figure_of(report.rows[i].overall) for report in reports]
                colour, label = COLOURS[i % len(COLOURS)], f"nextn {row.nextn}"
                axes.plot(range(len(sizes)), values, "o-", color=colour, label=label)
            label_x(axes, "concurrency (requests at once)", sizes)
            axes.set_ylabel(name)
            axes.set_ylim(bottom=0)
        title = f"{reports[0].model}: tokens/s against the batch"
        share_legend(figure, title, both[0].get_legend_handles_labels()[0])
