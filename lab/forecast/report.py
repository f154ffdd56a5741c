"""A forecast as JSON, as tables and as a picture."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from mtpbuild.builder.models import find_family_of
from mtpbuild.builder.targets import list_target_names
from mtpbuild.builder.targets.capability import explain_capability
from mtpbuild.builder.targets.tensorrt import PROGRAMS
from mtpbuild.lab.forecast.forecast import PUBLISHED_SPEED, RESERVED, Forecast, StepForecast
from mtpbuild.lab.forecast.step import count_distinct_experts
from mtpbuild.lab.show.pictures import COLOURS, draw_panels, label_x
from mtpbuild.lab.show.tables import print_lines
from mtpbuild.runtime.files import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LATENCY = "#d8d8d8"
GROUPS = {  # of parts, bottom to top; `other weights` takes the parts that are not listed
    "experts": ("experts",),
    "attention, caches": ("attention", "caches"),
    "other weights": (),
    "drafting": ("MTP modules", "head of drafts", "MTP caches"),
}


def make_plan_json(f: Forecast) -> dict[str, Any]:
    """Make the JSON, in bytes, seconds and operations.

    docs/plan.md explains each key.
    """
    request, model = f.request, f.model
    tokens = [request.max_batch * (step.nextn + 1) for step in f.steps]
    return {
        "model": f.name,
        "gpu": model.gpu.name,
        **asdict(request.ranks),
        "max_batch": request.max_batch,
        "max_seq_len": request.max_seq_len,
        "context_len": request.context_len,
        "cache_dtype": request.cache_dtype,
        "checkpoint_bytes": f.checkpoint_bytes,
        "weights_bytes_per_rank": round(f.weight_bytes),
        "tensorrt_weights_bytes_per_rank": round(f.tensorrt_bytes),
        "classes": [
            {
                "name": weights.name,
                "mtp": weights.module,
                "formats": sorted(weights.formats),
                "parameters": weights.parameters,
                "checkpoint_bytes": weights.bytes,
                "bytes_per_rank": round(weights.per_rank),
            }
            for weights in model.classes
        ],
        "memory_bytes_per_rank": round(model.gpu.memory),
        "reserved_bytes_per_rank": round(model.gpu.memory * RESERVED),
        "scratch_bytes_per_rank": round(f.scratch_bytes),
        "kv_bytes_per_token_per_rank": f.cache_bytes,
        "kv_tokens_per_rank": f.cache_tokens,
        "kv_tokens_needed_per_rank": f.needed_tokens,
        "fits": f.fits,
        "nextn": [step.nextn for step in f.steps],
        "acceptance_lengths": [step.acceptance for step in f.steps],
        "distinct_experts": [count_distinct_experts(model.costs, count) for count in tokens],
        "parts": [[asdict(part) for part in step.parts] for step in f.steps],
        "bytes_per_step": [step.bytes for step in f.steps],
        "operations_per_step": [step.operations for step in f.steps],
        "roofline_step_s": [step.roofline for step in f.steps],
        "predicted_step_s": [step.seconds for step in f.steps],
        "roofline_tokens_per_s": [step.acceptance / step.roofline for step in f.steps],
        "predicted_tokens_per_s": [step.tokens_per_s for step in f.steps],
        "predicted_speedups": f.speedups,
        "limits": [step.limit for step in f.steps],
        "latency": asdict(f.latency),
    }


def print_forecast(f: Forecast) -> None:
    """Print the weights by class, the memory, each nextn, the last one's parts, the assumptions."""
    ranks = f.request.ranks
    dp = ", attention data-parallel" if ranks.attention_dp else ""
    print_lines(f"{f.name} on {ranks.tp} {f.model.gpu.name} (tp {ranks.tp}, ep {ranks.ep}{dp})")
    print_lines(_make_weights_table(f), fold=False)
    _print_memory(f)
    print_lines(_make_steps_table(f), _make_parts_table(f), fold=False)
    _print_assumptions(f)


def _make_weights_table(f: Forecast) -> Table:
    table = Table("weights", "format", "parameters", "checkpoint", "per rank")
    for weights in f.model.classes:
        table.add_row(
            f"MTP: {weights.name}" if weights.module else weights.name,
            ", ".join(sorted(weights.formats)),
            f"{weights.parameters / 1e9:.3g} B",
            format_size(weights.bytes),
            format_size(weights.per_rank),
        )
    copies = f.checkpoint_bytes - sum(weights.bytes for weights in f.model.classes)
    if copies > 0:
        table.add_row("copies in MTP layers", "", "", format_size(copies), "shared")
    parameters = sum(weights.parameters for weights in f.model.classes) / 1e9
    total = (f"{parameters:.4g} B", format_size(f.checkpoint_bytes), format_size(f.weight_bytes))
    table.add_row("all", "", *total, style="bold")
    return table


def _print_memory(f: Forecast) -> None:
    request, gpu = f.request, f.model.gpu
    sizes = (gpu.memory, f.weight_bytes, f.scratch_bytes, gpu.memory * RESERVED)
    memory, weights, scratch, reserved = map(format_size, sizes)
    print_lines(
        f"memory per rank: {memory}, of it {weights} weights, {scratch} scratch, {reserved} "
        "reserved",
        f"target tensorrt holds {format_size(f.tensorrt_bytes)} of weights: experts and head "
        f"once, all others in each of its {PROGRAMS} programs",
    )
    if f.free_bytes < 0:
        too_much = format_size(-f.free_bytes)
        print_lines(f"does not fit: {too_much} too much before any cache", style="red")
        return
    print_lines(
        f"cache: {f.cache_bytes:,} bytes per token on every rank; {f.cache_tokens:,} tokens fit, "
        f"{f.needed_tokens:,} are needed for --max-batch {request.max_batch} of "
        f"--max-seq-len {request.max_seq_len}"
    )
    if not f.fits:
        print_lines("does not fit: lower --max-batch or --max-seq-len", style="red")


def _make_steps_table(f: Forecast) -> Table:
    table = Table("nextn", *(str(step.nextn) for step in f.steps))
    lines: dict[str, Callable[[StepForecast], str]] = {
        "acceptance": lambda s: f"{s.acceptance:.2f}",
        "GB read": lambda s: f"{s.bytes / 1e9:.2f}",
        "Gop": lambda s: f"{s.operations / 1e9:.1f}",
        "roofline, ms": lambda s: f"{1e3 * s.roofline:.2f}",
        "step, ms": lambda s: f"{1e3 * s.seconds:.2f}",
        "limit": lambda s: s.limit,
    }
    if f.fits:
        lines["roofline, tok/s"] = lambda s: f"{s.acceptance / s.roofline:.0f}"
        lines["tokens/s"] = lambda s: f"{s.tokens_per_s:.0f}"
    for name, figure in lines.items():
        table.add_row(name, *map(figure, f.steps))
    if f.fits:
        table.add_row("over nextn 0", *(f"{speedup:.2f}" for speedup in f.speedups))
    return table


def _make_parts_table(f: Forecast) -> Table:
    step = f.steps[-1]
    table = Table(f"part of a step, nextn {step.nextn}", "GB", "Gop", "ms", "share", "limit")
    rows = [
        (p.name, f"{p.bytes / 1e9:.3f}", f"{p.operations / 1e9:.1f}", p.seconds, p.limit)
        for p in step.parts
    ]
    for *known, seconds, limit in (*rows, ("the rest", "", "", step.latency, "latency")):
        table.add_row(*known, f"{1e3 * seconds:.3f}", f"{seconds / step.seconds:.1%}", limit)
    return table


def _print_assumptions(f: Forecast) -> None:
    request, latency = f.request, f.latency
    print_lines(
        f"speeds are one user's, {request.max_batch} at once, each with {request.context_len:,} "
        f"cached tokens ({request.cache_dtype})",
        f"step = {1e3 * latency.base:.2f} ms + {1e3 * latency.per_draft:.2f} ms x nextn + "
        f"roofline; constants: {latency.source}",
    )
    if request.measured is None and not f.is_published:
        note = "assumed to hold here: another model, machine or load has others; measure two nextn "
        print_lines(f"{note}and give --measured", style="yellow")
    attention = find_family_of(f.model.config).attention
    if not list_target_names(lambda target: attention in target.gpu_attention):
        note = "targets for GPUs have no kernel for this model's attention yet: "
        print_lines(f"{note}`mtpbuild build` refuses them", style="yellow")
    formats = {name: None for weights in f.model.classes for name in weights.formats}
    if why := explain_capability(formats, [f.model.gpu.capability]):
        print_lines(f"target tensorrt builds no such engine: {why}; inductor does", style="yellow")
    if request.acceptance is None:
        print_lines("acceptance lengths: DeepSeek-R1's, published; give --acceptance for others")


def draw_forecast(f: Forecast, path: Path) -> None:
    """Draw time and speed over the same nextn."""
    with draw_panels(path, f"latency: {f.latency.source}") as (figure, (left, right)):
        draw_time(left, f)
        draw_speed(right, f)
        for axes in (left, right):
            label_x(axes, "nextn (draft tokens per step)", [step.nextn for step in f.steps])
            axes.set_ylim(top=1.25 * axes.get_ylim()[1])
            axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=3)
        ranks = f.request.ranks
        figure.suptitle(f"{f.name} on {ranks.tp} {f.model.gpu.name}, {f.request.max_batch} at once")


def draw_time(axes: "Axes", f: Forecast) -> None:
    """Stack the milliseconds of a step: memory and arithmetic below, latency above."""
    group = {part: name for name, parts in GROUPS.items() for part in parts}
    times: dict[str, list[float]] = {name: [0.0] * len(f.steps) for name in (*GROUPS, "latency")}
    for i, step in enumerate(f.steps):
        times["latency"][i] = 1e3 * step.latency
        for part in step.parts:
            times[group.get(part.name, "other weights")][i] += 1e3 * part.seconds
    bottom = [0.0] * len(f.steps)
    for (name, values), colour in zip(times.items(), (*COLOURS, LATENCY), strict=True):
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
        published = [PUBLISHED_SPEED[step.nextn] for step in f.steps]
        axes.plot(places, published, "o", color="black", markersize=4, label="published")
    axes.set_ylabel("tokens/s of one user")
