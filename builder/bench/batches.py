"""Several concurrencies side by side: tokens/s of all users and of one, by nextn."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from mtpbuild.builder.bench.figures import Figures, recommendation
from mtpbuild.builder.bench.picture import COLOURS, GREY
from mtpbuild.builder.bench.report import Report, differs, machine_line, to_json

if TYPE_CHECKING:
    from rich.table import Table


def of_all(f: Figures) -> float:
    """Output tokens per second of all users together, prompts included in the time."""
    return f.output_tokens / f.duration


def of_one(f: Figures) -> float:
    """Tokens per second that one user sees, from the first token on."""
    return f.tokens_per_s


PANELS: dict[str, Callable[[Figures], float]] = {
    "tokens/s of all users": of_all,
    "tokens/s per user": of_one,
}


def to_batches_json(reports: Sequence[Report]) -> dict[str, Any]:
    """docs/bench.md describes it; `runs` has what a single concurrency would have given."""
    return {
        "batches": [
            {
                "concurrency": report.settings["concurrency"],
                "nextn": row.nextn,
                "output_throughput": of_all(row.overall),
                "user_tokens_per_s": of_one(row.overall),
                "speedup": asdict(row.overall.speedup),
            }
            for report in reports
            for row in report.rows
        ],
        "runs": [to_json(report) for report in reports],
    }


def table(reports: Sequence[Report], name: str) -> "Table":
    """One line per concurrency, one column per nextn."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    result = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    result.add_column(name, no_wrap=True)
    for row in reports[0].rows:
        result.add_column(f"nextn {row.nextn}", justify="right", no_wrap=True)
    for report in reports:
        cells = (f"{PANELS[name](row.overall):.1f}" for row in report.rows)
        result.add_row(f"concurrency {report.settings['concurrency']}", *cells)
    return result


def print_batches(reports: Sequence[Report]) -> None:
    """Both tables, the machine, and what to choose at each concurrency."""
    from rich.console import Console

    console, first = Console(highlight=False), reports[0]
    total = first.settings["num_requests"]
    console.print(f"\n{first.model}: {total} requests", style="bold", soft_wrap=True)
    for name in PANELS:
        console.print(table(reports, name))
    if (why := differs(first.settings)) is not None:
        console.print(why, soft_wrap=True)
    console.print(f"\n{machine_line(first.machine)}", soft_wrap=True)
    for report in reports:
        line = f"concurrency {report.settings['concurrency']}: {recommendation(report.rows)[1]}"
        console.print(line, style="bold", soft_wrap=True)


def draw_batches(reports: Sequence[Report], path: Path, note: str) -> None:
    """A line per nextn against the concurrency; note: what was measured on, in small print."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    places = range(len(reports))
    sizes = [str(report.settings["concurrency"]) for report in reports]
    nextns = [row.nextn for row in reports[0].rows]
    both = figure.subplots(1, 2)
    for axes, (name, figure_of) in zip(both, PANELS.items(), strict=True):
        for i, nextn in enumerate(nextns):
            values = [figure_of(report.rows[i].overall) for report in reports]
            colour = COLOURS[i % len(COLOURS)]
            axes.plot(places, values, "o-", color=colour, label=f"nextn {nextn}")
        axes.set_xlabel("concurrency (requests at once)")
        axes.set_xticks(places, sizes)
        axes.set_ylabel(name)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.yaxis.grid(True, color="#dddddd")
    figure.legend(
        handles=both[0].get_legend_handles_labels()[0],
        title=f"{reports[0].model}: tokens/s against the batch",
        title_fontsize=13,
        loc="outside upper center",
        ncols=len(nextns),
        frameon=False,
        fontsize=9,
    )
    figure.supxlabel(fill(note, 150), fontsize=7, color=GREY)
    figure.savefig(path, dpi=160)
