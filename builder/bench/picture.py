"""Speedup and acceptance length against nextn, as a PNG."""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from mtpbuild.builder.bench.figures import ALL, Row
from mtpbuild.runtime.errors import MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
GREY = "#777777"


def require_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise MissingDependencyError(
            "the picture of a benchmark needs matplotlib: pip install 'mtpbuild[bench]'"
        )


def draw(rows: Sequence[Row], path: Path, title: str, note: str) -> None:
    """note: what the figures were measured on, in small print."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    kinds = [kind for kind in rows[0].kinds if kind != ALL]
    draw_speedup(left, rows, kinds)
    draw_length(right, rows, kinds)
    for axes in (left, right):
        axes.set_xlabel("nextn (draft tokens per step)")
        axes.set_xticks(range(len(rows)), [str(row.nextn) for row in rows])
        axes.spines[["top", "right"]].set_visible(False)
        axes.yaxis.grid(True, color="#dddddd")
        axes.set_axisbelow(True)
    handles = [*left.get_legend_handles_labels()[0], right.lines[-1]]
    figure.legend(
        handles=handles,
        title=title,
        title_fontsize=13,
        loc="outside upper center",
        ncols=len(handles),
        frameon=False,
        fontsize=9,
    )
    figure.supxlabel(fill(note, 150), fontsize=7, color=GREY)
    figure.savefig(path, dpi=160)


def draw_speedup(axes: "Axes", rows: Sequence[Row], kinds: Sequence[str]) -> None:
    """Bars with their 95 % intervals; a dash where the parts predict the bar's top."""
    width = 0.8 / len(kinds)
    for k, kind in enumerate(kinds):
        places = [i - 0.4 + width * (k + 0.5) for i in range(len(rows))]
        ratios = [row.kinds[kind].speedup for row in rows]
        values = [ratio.value for ratio in ratios]
        below = [max(0.0, r.value - (r.low or r.value)) for r in ratios]
        above = [max(0.0, (r.high or r.value) - r.value) for r in ratios]
        axes.bar(places, values, width * 0.92, color=COLOURS[k % len(COLOURS)], label=kind)
        axes.errorbar(places, values, [below, above], fmt="none", ecolor="#333333", capsize=2)
        for place, value, up in zip(places, values, above, strict=True):
            axes.annotate(
                f"{value:.2f}",
                (place, value + up),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=7,
            )
        predicted = [row.kinds[kind].predicted or math.nan for row in rows]
        label = "predicted: L / (v + d)" if k == len(kinds) - 1 else None
        axes.plot(places, predicted, "_", color="black", markersize=14, label=label)
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.set_ylabel("speedup over nextn 0")
    axes.margins(y=0.1)


def draw_length(axes: "Axes", rows: Sequence[Row], kinds: Sequence[str]) -> None:
    """A line per kind, and the most that there could be."""
    places = range(len(rows))
    for k, kind in enumerate(kinds):
        lengths = [row.kinds[kind].drafting.mean_acceptance_length or 1 for row in rows]
        axes.plot(places, lengths, "o-", color=COLOURS[k % len(COLOURS)], label=kind)
    most = [row.most + 1 for row in rows]
    axes.plot(places, most, ":", color=GREY, label="all drafts accepted")
    axes.set_ylabel("acceptance length (tokens per step)")
    axes.set_ylim(bottom=0.9)
