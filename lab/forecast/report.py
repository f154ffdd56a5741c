"""A forecast as JSON, as tables and as a picture."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mtpbuild.builder.models import find_family_of
from mtpbuild.builder.targets import list_target_names
from mtpbuild.builder.targets.capability import explain_capability
from mtpbuild.builder.targets.tensorrt import PROGRAMS
from mtpbuild.lab.forecast.forecast import (
    PUBLISHED_SPEED,
    RESERVED,
    Forecast,
    has_one_rank,
    make_load_json,
)
from mtpbuild.lab.show.pictures import Line, Panel, Picture
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.files import format_size
from mtpbuild.runtime.tables import Row, print_lines, print_table

GROUPS = {  # of parts; `other weights` takes the parts that are not listed
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
    return {
        "model": f.name,
        "gpu": model.gpu.name,
        **asdict(request.ranks),
        **make_load_json(request, model, {step.nextn: step.acceptance for step in f.steps}),
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
    print_table(_list_weights(f), texts=("format",))
    _print_memory(f)
    print_table(_list_steps(f))
    print_table(_list_parts(f))
    _print_assumptions(f)


def _list_weights(f: Forecast) -> Iterator[Row]:
    """List the rows of a table of weight classes, of what MTP layers copy, and of the sums."""
    yield "weights", "format", "parameters", "checkpoint", "per rank"
    classes = f.model.classes
    for weights in classes:
        yield (
            f"MTP: {weights.name}" if weights.module else weights.name,
            ", ".join(sorted(weights.formats)),
            f"{weights.parameters / 1e9:.3g} B",
            format_size(weights.bytes),
            format_size(weights.per_rank),
        )
    if (copies := f.checkpoint_bytes - sum(weights.bytes for weights in classes)) > 0:
        yield "copies in MTP layers", "", "", format_size(copies), "shared"
    parameters = f"{sum(weights.parameters for weights in classes) / 1e9:.4g} B"
    yield "all", "", parameters, format_size(f.checkpoint_bytes), format_size(f.weight_bytes)


def _print_memory(f: Forecast) -> None:
    request = f.request
    gpu = f.model.gpu
    sizes = (gpu.memory, f.weight_bytes, f.scratch_bytes, gpu.memory * RESERVED)
    memory, weights, scratch, reserved = map(format_size, sizes)
    print_lines(
        f"memory per rank: {memory}, of it {weights} weights, {scratch} scratch, {reserved} "
        "reserved"
    )
    if not has_one_rank(f.model.config):
        print_lines(
            f"target tensorrt holds {format_size(f.tensorrt_bytes)} of weights: experts and head "
            f"once, all others in each of its {PROGRAMS} programs"
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


def _list_steps(f: Forecast) -> Iterator[Row]:
    """List the rows of a table with a column per nextn; it has speeds only if the model fits."""
    yield "nextn", *(str(s.nextn) for s in f.steps)
    yield "acceptance", *(f"{s.acceptance:.2f}" for s in f.steps)
    yield "GB read", *(f"{s.bytes / 1e9:.2f}" for s in f.steps)
    yield "Gop", *(f"{s.operations / 1e9:.1f}" for s in f.steps)
    yield "roofline, ms", *(f"{1e3 * s.roofline:.2f}" for s in f.steps)
    yield "step, ms", *(f"{1e3 * s.seconds:.2f}" for s in f.steps)
    yield "limit", *(s.limit for s in f.steps)
    if f.fits:
        yield "roofline, tok/s", *(f"{s.acceptance / s.roofline:.0f}" for s in f.steps)
        yield "tokens/s", *(f"{s.tokens_per_s:.0f}" for s in f.steps)
        yield "over nextn 0", *(f"{speedup:.2f}" for speedup in f.speedups)


def _list_parts(f: Forecast) -> Iterator[Row]:
    """List the rows of a table of the parts of the last nextn's step, and of the constant rest."""
    step = f.steps[-1]
    yield f"part of a step, nextn {step.nextn}", "GB", "Gop", "ms", "share", "limit"
    rest = ("the rest", "", "", step.latency, "latency")
    parts = [
        (p.name, f"{p.bytes / 1e9:.3f}", f"{p.operations / 1e9:.1f}", p.seconds, p.limit)
        for p in step.parts
    ]
    for name, read, operations, seconds, limit in (*parts, rest):
        times = f"{1e3 * seconds:.3f}", f"{seconds / step.seconds:.1%}"
        yield name, read, operations, *times, limit


def _print_assumptions(f: Forecast) -> None:
    request = f.request
    latency = f.latency
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
        note = "not built yet for GPUs: no target has a kernel there for this model's attention, "
        print_lines(f"{note}so `mtpbuild build` refuses them", style="yellow")
    if has_one_rank(f.model.config):
        note = "no engine of this model has several ranks yet: weights count as they are stored, "
        print_lines(f"{note}those of attention whole on each rank", style="yellow")
    formats = {name: None for weights in f.model.classes for name in weights.formats}
    if why := explain_capability(formats, [f.model.gpu.capability]):
        print_lines(f"target tensorrt builds no such engine: {why}; inductor does", style="yellow")
    if request.acceptance is None:
        print_lines("acceptance lengths: DeepSeek-R1's, published; give --acceptance for others")


def draw_forecast(f: Forecast, path: Path) -> None:
    """Draw `plot_forecast` for --picture; raise UsageError if the file can't be written."""
    try:
        plot_forecast(f).draw(path)
    except (OSError, ValueError) as error:  # a place or an ending that can't be written
        raise UsageError(f"--picture {path}: can't be written ({error})") from None


def plot_forecast(f: Forecast) -> Picture:
    """Plot time and speed over the same nextn."""
    group = {part: name for name, parts in GROUPS.items() for part in parts}
    times: dict[str, list[float]] = {name: [0.0] * len(f.steps) for name in (*GROUPS, "latency")}
    for i, step in enumerate(f.steps):
        times["latency"][i] = 1e3 * step.latency
        for part in step.parts:
            times[group.get(part.name, "other weights")][i] += 1e3 * part.seconds
    speeds = [step.tokens_per_s for step in f.steps]
    predictions = [Line("predicted", speeds, notes=[f"{speed:.0f}" for speed in speeds])]
    if f.is_published:
        published = [PUBLISHED_SPEED[step.nextn] for step in f.steps]
        predictions.append(Line("published", published, look="_"))
    ticks = [step.nextn for step in f.steps]
    axis = "nextn (draft tokens per step)"
    parts = [Line(name, values) for name, values in times.items()]
    return Picture(
        f"{f.name} on {f.request.ranks.tp} {f.model.gpu.name}, {f.request.max_batch} at once",
        f"latency: {f.latency.source}",
        [
            Panel(axis, "ms per step, by part", parts, ticks, {"ylim": (0, None)}),
            Panel(axis, "tokens/s of one user", predictions, ticks, {"ylim": (0, None)}),
        ],
    )
