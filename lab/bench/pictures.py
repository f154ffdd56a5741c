"""Pictures of a benchmark as PNGs: against nextn, against the concurrency, and step by step."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpbuild.lab.bench.figures import PER_POSITION, NextnResult
from mtpbuild.lab.bench.report import PANELS, Benchmark
from mtpbuild.lab.measure.statistics import ALL, compute_percentile
from mtpbuild.lab.show import pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BARS = 40  # of a histogram


def draw_speedups(report: Benchmark, path: Path) -> None:
    """Draw speedups and acceptance lengths against nextn."""
    rows = report.rows
    kinds = [kind for kind in rows[0].kinds if kind != ALL]
    note = pictures.write_machine_note(report.machine)
    with pictures.draw_panels(path, note) as (figure, (left, right)):
        draw_speedup(left, rows, kinds)
        lengths = {
            kind: [row.kinds[kind]["spec_decode_acceptance_length"] or 1 for row in rows]
            for kind in kinds
        }
        pictures.draw_lines(right, range(len(rows)), lengths)
        most = [row.most + 1 for row in rows]
        right.plot(most, ":", color=pictures.GREY, label="all drafts accepted")
        right.set_ylabel("acceptance length (tokens per step)")
        right.set_ylim(bottom=0.9)
        for axes in (left, right):
            pictures.label_x(axes, "nextn (draft tokens per step)", [row.nextn for row in rows])
        handles = [*left.get_legend_handles_labels()[0], right.lines[-1]]
        pictures.share_legend(figure, f"{report.model}: what MTP gives", handles)


def draw_speedup(axes: "Axes", rows: Sequence[NextnResult], kinds: Sequence[str]) -> None:
    """Draw bars with their 95 % intervals, and a dash at the predicted speedup."""
    width = 0.8 / len(kinds)
    for k, kind in enumerate(kinds):
        places = [i - 0.4 + width * (k + 0.5) for i in range(len(rows))]
        ratios = [row.speedup(kind) for row in rows]
        values = [ratio.value for ratio in ratios]
        reach = pictures.compute_error_bar_lengths(ratios)
        axes.bar(places, values, width * 0.92, color=pictures.choose_colour(k), label=kind)
        axes.errorbar(places, values, reach, fmt="none", ecolor="#333333", capsize=2)
        predicted = [row.kinds[kind]["predicted_speedup"] or math.nan for row in rows]
        for place, value, up, mark in zip(places, values, reach[1], predicted, strict=True):
            top = max(value + up, mark if mark > 0 else 0)
            pictures.write_above(axes, f"{value:.2f}", place, top)
        label = "predicted: L / (v + d)" if k == len(kinds) - 1 else None
        axes.plot(places, predicted, "_", color="black", markersize=14, label=label)
    axes.axhline(1, color=pictures.GREY, linewidth=0.8)
    axes.set_ylabel("speedup over nextn 0")
    axes.margins(y=0.1)


def draw_batches(reports: Sequence[Benchmark], path: Path) -> None:
    """Draw a line per nextn against the concurrency."""
    first, sizes = reports[0], [report.settings["concurrency"] for report in reports]
    with pictures.draw_panels(path, pictures.write_machine_note(first.machine)) as (figure, both):
        for axes, (name, key) in zip(both, PANELS.items(), strict=True):
            lines = {
                f"nextn {row.nextn}": [report.rows[i].overall[key] for report in reports]
                for i, row in enumerate(first.rows)
            }
            pictures.draw_lines(axes, range(len(sizes)), lines)
            pictures.label_x(axes, "concurrency (requests at once)", sizes)
            axes.set_ylabel(name)
            axes.set_ylim(bottom=0)
        title = f"{first.model}: tokens/s against the batch"
        pictures.share_legend(figure, title, both[0].get_legend_handles_labels()[0])


def draw_steps(report: Benchmark, path: Path) -> None:
    """Draw how long steps took, and how often drafts were accepted at each position."""
    note = pictures.write_machine_note(report.machine)
    with pictures.draw_panels(path, note) as (figure, (left, right)):
        draw_times(left, report)
        draw_positions(right, report.rows)
        handles = right.get_legend_handles_labels()[0]
        pictures.share_legend(figure, f"{report.model}: step by step", handles)


def draw_positions(axes: "Axes", rows: Sequence[NextnResult]) -> None:
    places, key = range(1, max(row.most for row in rows) + 1), PER_POSITION
    pictures.draw_lines(axes, places, {f"nextn {row.nextn}": row.overall[key] for row in rows})
    axes.set_xlabel("draft of a step")
    axes.set_xticks(places)
    axes.set_ylabel("share of steps that accepted it")
    axes.set_ylim(0, 1.02)


def draw_times(axes: "Axes", report: Benchmark) -> None:
    """Draw a histogram of each nextn's steps; each request's first step is left out."""
    times = [
        [1000 * each for group in measured.groups for answer in group for each in answer.intervals]
        for measured in report.measured.values()
    ]
    longest = compute_percentile([ms for steps in times for ms in steps], 99)
    for i, steps in enumerate(times):
        ms = [min(each, longest) for each in steps]
        look: dict[str, Any] = {"histtype": "step", "color": pictures.choose_colour(i)}
        axes.hist(ms, BARS, range=(0, longest), weights=[1 / len(ms)] * len(ms), **look)
    axes.set_xlabel("ms per step (the last bar: 99th percentile and above)")
    axes.set_ylabel("share of steps")
