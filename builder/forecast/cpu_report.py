"""A forecast for a CPU as JSON and as tables."""

from dataclasses import asdict
from typing import Any

from rich.table import Table

from mtpbuild.builder.checkpoint.hub_cache import cache_folder
from mtpbuild.builder.forecast.cpu import MAPPED, CpuEngine, CpuForecast, count_cache_bytes
from mtpbuild.builder.forecast.step import count_distinct_experts
from mtpbuild.builder.show.tables import format_size, print_lines
from mtpbuild.builder.weights.scheme import AS_STORED
from mtpbuild.runtime.prefix_cache.cache import SHARE


def make_cpu_plan_json(f: CpuForecast) -> dict[str, Any]:
    """Make the JSON, in bytes; lists are over `nextn`.

    docs/plan.md explains each key.
    """
    request, model, machine = f.request, f.model, f.machine
    tokens = [request.max_batch * (nextn + 1) for nextn in request.nextn]
    return {
        "model": f.name,
        "target": "onnxruntime",
        "max_batch": request.max_batch,
        "max_seq_len": request.max_seq_len,
        "context_len": request.context_len,
        "portions": [{"name": name, **asdict(part)} for name, part in f.portions.items()],
        "checkpoint_bytes": f.checkpoint_bytes,
        "download_bytes": f.download,
        "memory_bytes": machine.memory,
        "memory_available_bytes": machine.available,
        "disk_free_bytes": {"downloads": machine.downloads.free, "engines": machine.engines.free},
        "nextn": list(request.nextn),
        "acceptance_lengths": [f.lengths[nextn] for nextn in request.nextn],
        "bandwidth_bytes_per_s": f.bandwidth,
        "distinct_experts": [count_distinct_experts(model.costs, count) for count in tokens],
        "kv_bytes_per_token": [model.cache_bytes(nextn, "fp32") for nextn in request.nextn],
        "kv_bytes": [count_cache_bytes(request, model, nextn) for nextn in request.nextn],
        "engines": [
            {
                "weights": engine.weights or AS_STORED,
                "engine_bytes": engine.bytes,
                "memory_bytes": engine.memory,
                "bytes_per_step": engine.reads,
                "tokens_per_s": f.speeds(engine),
                "fits_memory": not engine.too_much,
                "fits_disk": not engine.lacking,
            }
            for engine in f.engines
        ],
    }


def print_cpu_forecast(f: CpuForecast) -> None:
    """Print the checkpoint's parts, and for each --weights the engine, its reads and its speed."""
    available = format_size(f.machine.available)
    print_lines(
        f"{f.name} on this machine's CPU: memory {format_size(f.machine.memory)}, of it "
        f"{available} available",
        _portions(f),
        _download(f),
        _engines(f),
        fold=False,
    )
    _room(f)
    _reads(f)


def _portions(f: CpuForecast) -> Table:
    table = Table("checkpoint", "parameters", "size")
    for name, portion in f.portions.items():
        if portion.parameters:
            parameters = f"{portion.parameters / 1e9:.4g} B"
            table.add_row(name, parameters, format_size(portion.bytes))
    return table


def _download(f: CpuForecast) -> str:
    if not f.download:
        return "download: nothing"
    free = format_size(f.machine.downloads.free)
    return f"download: {format_size(f.download)} to {cache_folder()}, {free} free there"


def _engines(f: CpuForecast) -> Table:
    table = Table("--weights", "engine", f"memory, nextn {f.request.nextn[-1]}", "fits")
    for engine in f.engines:
        sizes = map(format_size, (engine.bytes, engine.memory[-1]))
        table.add_row(engine.weights or AS_STORED, *sizes, describe_fit(engine))
    return table


def describe_fit(engine: CpuEngine) -> str:
    lacks = {"memory": engine.too_much, "disk": engine.lacking}
    missing = ", ".join(f"{format_size(size)} of {what}" for what, size in lacks.items() if size)
    return f"no, lacks {missing}" if missing else "yes"


def _room(f: CpuForecast) -> None:
    request, most = f.request, f.request.nextn[-1]
    shared = ", of which the download takes its part" if f.shares_disk else ""
    print_lines(
        f"memory: {MAPPED:g} times the engine, as "
        f"measured (docs/plan.md), and caches: "
        f"{f.model.cache_bytes(most, 'fp32'):,} bytes per token in fp32, "
        f"{format_size(count_cache_bytes(request, f.model, most))} for --max-batch "
        f"{request.max_batch} of --max-seq-len {request.max_seq_len}; `mtpbuild serve` keeps rows "
        f"of ended requests besides, in at most 1/{SHARE} of what is then free "
        "(--prefix-cache-bytes)",
        f"disk of this folder: {format_size(f.machine.engines.free)} free{shared}",
    )


def _reads(f: CpuForecast) -> None:
    request = f.request
    read, speed = (
        Table(name, *map(str, request.nextn)) for name in ("GB per step", "tokens/s, most")
    )
    for engine in f.engines:
        name = engine.weights or AS_STORED
        speeds = (None if each is None else float(f"{each:.3g}") for each in f.speeds(engine))
        read.add_row(name, *(f"{bytes / 1e9:.3f}" for bytes in engine.reads))
        speed.add_row(name, *("-" if each is None else f"{each:,g}" for each in speeds))
    measured = "given" if request.bandwidth else "measured now, all cores"
    lengths = "given" if request.acceptance else "DeepSeek-R1's, published"
    print_lines(
        read,
        f"by nextn; {request.max_batch} at once, each with {request.context_len:,} cached tokens; "
        "routed experts: those that the tokens choose, if all are equally likely",
        speed,
        f"by nextn, of one user, if a step did nothing but read these bytes from memory, at "
        f"{f.bandwidth / 1e9:.3g} GB/s ({measured}); arithmetic, prompts and other programs take "
        f"their part. Acceptance lengths: {lengths}",
        fold=False,
    )
