"""Pictures of a benchmark as PNGs: against nextn, against the concurrency, and step by step."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpbuild.builder.bench.figures import ALL, Row, percentile
from mtpbuild.builder.bench.report import PANELS, Benchmark
from mtpbuild.builder.show import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BARS = 40  # of a histogram


def draw(rows: Sequence[Row], path: Path, title: str, note: str) -> None:
    """Draw speedups and acceptance lengths.

    note: the machine that was measured, in small print.
    """
    kinds = [kind for kind in rows[0].kinds if kind != ALL]
    with picture.panels(path, note) as (figure, (left, right)):
        draw_speedup(left, rows, kinds)
        draw_length(right, rows, kinds)
        for axes in (left, right):
            picture.label_x(axes, "nextn (draft tokens per step)", [row.nextn for row in rows])
        handles = [*left.get_legend_handles_labels()[0], right.lines[-1]]
        picture.share_legend(figure, title, handles)


def draw_speedup(axes: "Axes", rows: Sequence[Row], kinds: Sequence[str]) -> None:
    """Draw bars with their 95 % intervals, and a dash at the predicted speedup."""
    width = 0.8 / len(kinds)
    for k, kind in enumerate(kinds):
        places = [i - 0.4 + width * (k + 0.5) for i in range(len(rows))]
        ratios = [row.kinds[kind].speedup for row in rows]
        values = [ratio.value for ratio in ratios]
        reach = picture.spans([(ratio.value, ratio.low, ratio.high) for ratio in ratios])
        axes.bar(places, values, width * 0.92, color=picture.colour(k), label=kind)
        axes.errorbar(places, values, reach, fmt="none", ecolor="#333333", capsize=2)
        predicted = [row.kinds[kind].predicted or math.nan for row in rows]
        for place, value, up, mark in zip(places, values, reach[1], predicted, strict=True):
            picture.write_above(
                axes, f"{value:.2f}", place, max(value + up, mark if mark > 0 else 0)
            )
        label = "predicted: L / (v + d)" if k == len(kinds) - 1 else None
        axes.plot(places, predicted, "_", color="black", markersize=14, label=label)
    axes.axhline(1, color=picture.GREY, linewidth=0.8)
    axes.set_ylabel("speedup over nextn 0")
    axes.margins(y=0.1)


def draw_length(axes: "Axes", rows: Sequence[Row], kinds: Sequence[str]) -> None:
    """Draw a line per kind of prompt, and the largest possible length."""
    places = range(len(rows))
    for k, kind in enumerate(kinds):
        lengths = [row.kinds[kind].drafting.mean_acceptance_length or 1 for row in rows]
        axes.plot(places, lengths, "o-", color=picture.colour(k), label=kind)
    most = [row.most + 1 for row in rows]
    axes.plot(places, most, ":", color=picture.GREY, label="all drafts accepted")
    axes.set_ylabel("acceptance length (tokens per step)")
    axes.set_ylim(bottom=0.9)


def draw_batches(reports: Sequence[Benchmark], path: Path, note: str) -> None:
    """Draw a line per nextn against the concurrency.

    note: the machine, in small print.
    """
    sizes = [report.settings["concurrency"] for report in reports]
    with picture.panels(path, note) as (figure, both):
        for axes, (name, figure_of) in zip(both, PANELS.items(), strict=True):
            for i, row in enumerate(reports[0].rows):
                values = [figure_of(report.rows[i].overall) for report in reports]
                colour, label = picture.colour(i), f"nextn {row.nextn}"
                axes.plot(range(len(sizes)), values, "o-", color=colour, label=label)
            picture.label_x(axes, "concurrency (requests at once)", sizes)
            axes.set_ylabel(name)
            axes.set_ylim(bottom=0)
        title = f"{reports[0].model}: tokens/s against the batch"
        picture.share_legend(figure, title, both[0].get_legend_handles_labels()[0])


def draw_steps(rows: Sequence[Row], path: Path, title: str, note: str) -> None:
    """Draw how long steps took, and how often drafts were accepted at each position."""
    with picture.panels(path, note) as (figure, (left, right)):
        draw_times(left, rows)
        draw_positions(right, rows)
        picture.share_legend(figure, title, right.get_legend_handles_labels()[0])


def draw_times(axes: "Axes", rows: Sequence[Row]) -> None:
    """Draw a histogram of each nextn's steps; each request's first step is left out."""
    longest = percentile([1000 * each for row in rows for each in row.overall.itl], 99)
    for i, row in enumerate(rows):
        ms = [min(1000 * each, longest) for each in row.overall.itl]
        look: dict[str, Any] = {"histtype": "step", "color": picture.colour(i)}
        axes.hist(ms, BARS, range=(0, longest), weights=[1 / len(ms)] * len(ms), **look)
    axes.set_xlabel("ms per step (the last bar: 99th percentile and above)")
    axes.set_ylabel("share of steps")


def draw_positions(axes: "Axes", rows: Sequence[Row]) -> None:
    for i, row in enumerate(rows):
        rates = row.overall.drafting.per_position_acceptance_rates
        colour, label = picture.colour(i), f"nextn {row.nextn}"
        axes.plot(range(1, len(rates) + 1), rates, "o-", color=colour, label=label)
    axes.set_xlabel("draft of a step")
    axes.set_xticks(range(1, max(row.most for row in rows) + 1))
    axes.set_ylabel("share of steps that accepted it")
    axes.set_ylim(0, 1.02)
