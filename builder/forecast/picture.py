"""Draws a forecast as a PNG: where a step's time goes, and what users get."""

from pathlib import Path
from typing import TYPE_CHECKING

from mtpbuild.builder.forecast.forecast import Forecast
from mtpbuild.builder.forecast.latency import PUBLISHED_SPEED
from mtpbuild.builder.picture import COLOURS, label_x, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LATENCY = "#d8d8d8"
GROUPS = {  # of parts, bottom to top; what is not named here is `other weights`
    "experts": ("experts",),
    "attention, caches": ("attention", "caches"),
    "other weights": (),
    "drafting": ("MTP modules", "head of drafts", "MTP caches"),
}


def draw(f: Forecast, path: Path) -> None:
    """Draw both panels over the same nextn."""
    with panels(path, f"latency: {f.latency.source}") as (figure, left, right):
        draw_time(left, f)
        draw_speed(right, f)
        for axes in (left, right):
            label_x(axes, "nextn (draft tokens per step)", [step.nextn for step in f.steps])
            axes.set_ylim(top=1.25 * axes.get_ylim()[1])
            axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=3)
        ranks = f.request.ranks
        figure.suptitle(f"{f.name} on {ranks.tp} {f.gpu.name}, {f.request.max_batch} at once")


def draw_time(axes: "Axes", f: Forecast) -> None:
    """Stacked milliseconds per step: what moves and is computed below, the rest above."""
    group = {part: name for name, parts in GROUPS.items() for part in parts}
    bottom = [0.0] * len(f.steps)
    for name, colour in zip((*GROUPS, "latency"), (*COLOURS, LATENCY), strict=True):
        values = [1e3 * step.latency if name == "latency" else 0.0 for step in f.steps]
        for i, step in enumerate(f.steps):
            parts = (p for p in step.parts if group.get(p.name, "other weights") == name)
            values[i] += 1e3 * sum(part.seconds for part in parts)
        axes.bar(range(len(f.steps)), values, 0.7, bottom, color=colour, label=name)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    axes.set_ylabel("ms per step")


def draw_speed(axes: "Axes", f: Forecast) -> None:
    places = range(len(f.steps))
    speeds = [step.tokens_per_s for step in f.steps]
    axes.bar(places, speeds, 0.7, color=COLOURS[0], label="predicted")
    for place, speed in zip(places, speeds, strict=True):
        axes.annotate(f"{speed:.0f}", (place, 0.94 * speed), ha="center", va="top", color="white")
    if f.is_published:
        known = {n: s for n, s in enumerate(PUBLISHED_SPEED) if n in f.request.nextn}
        found = [i for i, step in enumerate(f.steps) if step.nextn in known]
        values = [known[f.steps[i].nextn] for i in found]
        axes.plot(found, values, "o", color="black", markersize=4, label="published")
    axes.set_ylabel("tokens/s of one user")
