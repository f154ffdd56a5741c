"""The parts that all pictures share: panels, intervals, the small print."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from mtpbuild.runtime.errors import advise_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
GREY = "#777777"
Interval = tuple[float, float | None, float | None]  # a value and both ends, where they are known


def explain_no_pictures() -> str | None:
    """Return why nothing can be drawn; None if it can."""
    if find_spec("matplotlib") is None:
        return f"pictures need matplotlib, which is not installed: {advise_install('bench')}"
    return None


@contextmanager
def draw_panels(
    path: Path, note: str, columns: int = 2, rows: int = 1
) -> Iterator[tuple["Figure", list["Axes"]]]:
    """Yield empty panels; style and save them when the block ends.

    note: the small print.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * columns, 4.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = [*figure.subplots(rows, columns).flat]
    yield figure, panels
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.yaxis.grid(True, color="#dddddd")
        axes.set_axisbelow(True)
    figure.supxlabel(fill(note, 75 * columns), fontsize=7, color=GREY)
    figure.savefig(path, dpi=160)


def write_machine_note(machine: Mapping[str, Any]) -> str:
    """Return the small print that names the machine that was measured, and the command."""
    return f"{machine['cpu']}, {machine['cores']} cores; {machine['command']}"


def choose_colour(number: int) -> str:
    """Return the colour of series `number`, counted from 0; the colours repeat."""
    return COLOURS[number % len(COLOURS)]


def label_x(axes: "Axes", name: str, places: Sequence[object], **options: Any) -> None:
    """Write the names of the places 0, 1, .. under a panel."""
    axes.set_xlabel(name)
    axes.set_xticks(range(len(places)), list(map(str, places)), **options)


def draw_lines(axes: "Axes", places: Sequence[float], lines: Mapping[str, Sequence[float]]) -> None:
    """Draw a line with dots per series, each in its colour; a line may end before the others."""
    for number, (label, values) in enumerate(lines.items()):
        look: dict[str, Any] = {"color": choose_colour(number), "label": label}
        axes.plot(places[: len(values)], values, "o-", **look)


def share_legend(figure: "Figure", title: str, handles: Sequence[Any]) -> None:
    """Put one legend for all panels under the picture's title."""
    figure.legend(
        handles=handles,
        title=title,
        title_fontsize=13,
        loc="outside upper center",
        ncols=len(handles),
        frameon=False,
        fontsize=9,
    )


def compute_error_bar_lengths(points: Sequence[Interval]) -> list[list[float]]:
    """Return how far intervals reach below and above their values."""
    ends = [(v, v if low is None else low, v if high is None else high) for v, low, high in points]
    return [[max(0.0, v - low) for v, low, _ in ends], [max(0.0, high - v) for v, _, high in ends]]


def write_above(axes: "Axes", text: str, place: float, height: float, **look: Any) -> None:
    look = dict[str, Any](ha="center", fontsize=7) | look
    axes.annotate(text, (place, height), (0, 3), textcoords="offset points", **look)
