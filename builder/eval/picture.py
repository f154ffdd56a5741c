"""Accuracy and speed against the settings, as a PNG."""

from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from mtpbuild.builder.bench.picture import COLOURS, GREY
from mtpbuild.builder.eval.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(report: Report, path: Path) -> None:
    """Two panels over the same settings, with 95 % intervals."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    found = [row.overall for row in report.rows]
    shares = [(f.accuracy.value, *f.accuracy.interval) for f in found]
    draw_points(left, [(100 * p, 100 * low, 100 * high) for p, low, high in shares], COLOURS[0])
    left.set_ylabel("right answers, %")
    ratios = [f.speedup for f in found]
    speeds = [(r.value, r.low or r.value, r.high or r.value) for r in ratios]
    draw_points(right, speeds, COLOURS[1])
    right.set_ylabel("speedup over strict")
    for place, (f, speed) in enumerate(zip(found, speeds, strict=True)):
        right.annotate(
            f"{f.acceptance_length:.2f}",
            (place, speed[2]),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )
    for axes in (left, right):
        axes.set_xticks(range(len(found)), [row.name for row in report.rows], rotation=45)
        axes.set_xlabel("acceptance: strict, or relaxed top-k / delta" if len(found) > 2 else "")
        axes.spines[["top", "right"]].set_visible(False)
        axes.yaxis.grid(True, color="#dddddd")
        axes.set_axisbelow(True)
        axes.margins(y=0.15)
    m = report.machine
    figure.suptitle(
        f"{report.manifest.model.name}, nextn {report.manifest.build.nextn}: "
        f"{report.settings['num_problems']} problems of {Path(report.settings['task']).stem}"
    )
    note = "95 % intervals; above the speedups: acceptance length"
    note = f"{note}; {m['cpu']}, {m['cores']} cores; {m['command']}"
    figure.supxlabel(fill(note, 150), fontsize=7, color=GREY)
    figure.savefig(path, dpi=160)


def draw_points(axes: "Axes", points: list[tuple[float, float, float]], colour: str) -> None:
    """(value, low, high) of each setting; a line where strict is."""
    values = [value for value, *_ in points]
    below = [max(0.0, value - low) for value, low, _ in points]
    above = [max(0.0, high - value) for value, _, high in points]
    axes.errorbar(range(len(points)), values, [below, above], fmt="o", color=colour, capsize=3)
    axes.axhline(values[0], color=GREY, linewidth=0.8)
