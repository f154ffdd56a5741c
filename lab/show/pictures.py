"""Pictures of results: panels of lines with dots, 95 % intervals and a common legend."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import Any

from mtpbuild.runtime.errors import advise_install

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
GREY = "#555555"
REFERENCES = ("_", ":")  # looks of lines that others are compared with
Interval = tuple[float, float | None, float | None]  # a value and both ends, where they are known


@dataclass(frozen=True)
class Line:
    """Points of one panel; lines of one label have one colour in all panels.

    look: as matplotlib's `fmt`. notes: what stands beside the points.
    """

    label: str
    y: Sequence[Interval | float]
    x: Sequence[float] = ()  # default: 0, 1, ..
    look: str = "o-"
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Panel:
    """Lines over one axis. ticks: the names of places 0, 1, ..; options: as of `Axes.set`."""

    x: str
    y: str
    lines: Sequence[Line]
    ticks: Sequence[object] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Picture:
    """Panels under one title; note: the small print."""

    title: str
    note: str
    panels: Sequence[Panel]
    columns: int = 2

    def draw(self, path: Path) -> None:
        """Write the picture to a file; its ending chooses the format."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        rows = -(-len(self.panels) // self.columns)
        figure = Figure(figsize=(4.5 * self.columns, 4.2 * rows), layout="constrained")
        FigureCanvasAgg(figure)
        labels = dict.fromkeys(line.label for panel in self.panels for line in panel.lines)
        colours = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(labels)}
        handles = {}
        for axes, panel in zip(figure.subplots(rows, self.columns).flat, self.panels, strict=True):
            for number, line in enumerate(panel.lines):
                colour = GREY if line.look in REFERENCES else colours[line.label]
                handles[line.label] = _draw_line(axes, line, colour, number)
            axes.set(xlabel=panel.x, ylabel=panel.y, **panel.options)
            if panel.ticks:
                names = [str(tick) for tick in panel.ticks]
                rotation = 45 if max(map(len, names)) > 4 else 0
                axes.set_xticks(range(len(names)), names, rotation=rotation)
            axes.margins(y=0.15)
            axes.spines[["top", "right"]].set_visible(False)
            axes.yaxis.grid(True, color="#dddddd")
            axes.set_axisbelow(True)
        if len(handles) > 1:
            look: dict[str, Any] = {"title_fontsize": 13, "fontsize": 9, "frameon": False}
            look |= {"loc": "outside upper center", "ncols": 4, "title": self.title}
            figure.legend(handles.values(), handles, **look)
        else:
            figure.suptitle(self.title)
        figure.supxlabel(fill(self.note, 75 * self.columns), fontsize=7, color=GREY)
        figure.savefig(path, dpi=160)


def _draw_line(axes: Any, line: Line, colour: str, number: int) -> Any:
    """Draw one line; the notes of the panel's lines stand one under the other."""
    x = line.x or range(len(line.y))
    points = [y if isinstance(y, tuple) else (y, None, None) for y in line.y]
    values = [value for value, _, _ in points]
    below = [0.0 if low is None else max(0.0, value - low) for value, low, _ in points]
    above = [0.0 if high is None else max(0.0, high - value) for value, _, high in points]
    for place, value, note in zip(x, values, line.notes, strict=False):
        look = {"textcoords": "offset points", "fontsize": 7, "color": colour}
        axes.annotate(note, (place, value), (4, 3 - 9 * number), **look)
    look = {"fmt": line.look, "color": colour, "capsize": 2, "zorder": 2 + number}
    return axes.errorbar(x, values, [below, above] if any((*below, *above)) else None, **look)


def explain_no_pictures() -> str | None:
    """Return why nothing can be drawn; None if it can."""
    if find_spec("matplotlib") is None:
        return f"pictures need matplotlib, which is not installed: {advise_install('bench')}"
    return None


def write_machine_note(machine: Mapping[str, Any]) -> str:
    """Return the small print that names the machine that was measured, and the command."""
    return f"{machine['cpu']}, {machine['cores']} cores; {machine['command']}"
