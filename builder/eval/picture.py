"""Accuracy and speed against the settings, as a PNG."""

from pathlib import Path
from typing import TYPE_CHECKING

from mtpbuild.builder.eval.report import Report
from mtpbuild.builder.picture import COLOURS, GREY, label_x, panels, spans, write_above

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(report: Report, path: Path) -> None:
    """Draws two panels over the same settings, with 95 % intervals."""
    found, m = [row.overall for row in report.rows], report.machine
    note = "95 % intervals; above the speedups: acceptance length"
    with panels(path, f"{note}; {m['cpu']}, {m['cores']} cores; {m['command']}") as drawn:
        figure, left, right = drawn
        shares = [(f.accuracy.value, *f.accuracy.interval) for f in found]
        draw_points(left, [(100 * p, 100 * low, 100 * high) for p, low, high in shares], COLOURS[0])
        left.set_ylabel("right answers, %")
        ratios = [f.speedup for f in found]
        speeds = [(r.value, r.low or r.value, r.high or r.value) for r in ratios]
        draw_points(right, speeds, COLOURS[1])
        right.set_ylabel("speedup over strict")
        for place, (f, speed) in enumerate(zip(found, speeds, strict=True)):
            write_above(right, f"{f.acceptance_length:.2f}", place, speed[2])
        for axes in (left, right):
            name = "acceptance: strict, or relaxed top-k / delta" if len(found) > 2 else ""
            label_x(axes, name, [row.name for row in report.rows], rotation=45)
            axes.margins(y=0.15)
        figure.suptitle(
            f"{report.manifest.model.name}, nextn {report.manifest.build.nextn}: "
            f"{report.settings['num_problems']} problems of {Path(report.settings['task']).stem}"
        )


def draw_points(axes: "Axes", points: list[tuple[float, float, float]], colour: str) -> None:
    """(value, low, high) of each setting; a line where strict is."""
    values = [value for value, *_ in points]
    axes.errorbar(range(len(points)), values, spans(points), fmt="o", color=colour, capsize=3)
    axes.axhline(values[0], color=GREY, linewidth=0.8)
