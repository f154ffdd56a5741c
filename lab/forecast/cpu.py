"""`mtpbuild plan --cpu`: the download, disk, memory and bytes read of onnxruntime's engines.

Whatever its nextn, an engine holds every weight of the main model and of the MTP modules. The
weights that `build --weights` quantises are integers, all others fp32.
"""

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from mtpbuild.builder.checkpoint.hub_cache import cache_folder
from mtpbuild.builder.checkpoint.shards import has_weights
from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.models.common.moe_config import computes_all_experts
from mtpbuild.builder.plan.context import MAPPED, choose_context
from mtpbuild.builder.plan.machine import Machine, measure_machine
from mtpbuild.builder.plan.recipe import name_model
from mtpbuild.builder.plan.weight_classes import (
    CheckpointLayout,
    CheckpointPortion,
    count_classes,
    count_engine_classes,
    count_file_bytes,
    sum_portions,
)
from mtpbuild.builder.targets.onnxruntime import CACHE_DTYPES
from mtpbuild.builder.targets.onnxruntime.pipeline import CPU
from mtpbuild.builder.weights.quantised_view import format_by
from mtpbuild.builder.weights.scheme import AS_STORED, Scheme, build_scheme
from mtpbuild.lab.forecast.forecast import (
    ByNextn,
    ForecastRequest,
    choose_acceptance_lengths,
    make_load_json,
    resolve_request,
)
from mtpbuild.lab.forecast.machines import UNKNOWN
from mtpbuild.lab.forecast.step import CostModel, StepLoad
from mtpbuild.lab.measure.host import measure_bandwidth
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.files import format_size
from mtpbuild.runtime.prefix_cache.cache import SHARE
from mtpbuild.runtime.ranks import ALONE
from mtpbuild.runtime.tables import print_lines, print_table

# Values of --weights; None: integers as the checkpoint has them, int8, or fp32.
FORMATS = ("int8", "int4")
EXPERTS = "experts"  # a class of weights
IN_CACHES = ("caches", "recurrent states")  # parts of a step that are no weights
ASKED = (None, *FORMATS)


@dataclass(frozen=True)
class CpuEngine:
    """The engine that `build --weights` would make; lists are over the request's nextn.

    bytes: the size of the weights file. missing: a step's bytes that are not in memory, at least.
    context: what `build` chooses without --max-seq-len.
    """

    weights: str | None
    bytes: int
    memory: list[int]
    reads: list[float]
    missing: list[float]
    too_much: int  # bytes of memory that the largest nextn needs beyond the machine's
    lacking: int  # bytes of disk space that are missing
    context: int

    @property
    def name(self) -> str:
        """The value of --weights."""
        return self.weights or AS_STORED

    @property
    def fits(self) -> bool:
        return not self.too_much and not self.lacking


@dataclass(frozen=True)
class CpuForecast:
    """The figures that `mtpbuild plan --cpu` shows."""

    request: ForecastRequest
    name: str
    model: CostModel  # of the engine in fp32
    portions: dict[str, CheckpointPortion]
    download: int  # bytes; 0: the weights are here, or are generated here
    machine: Machine
    bandwidth: float  # of memory, in bytes/s
    lengths: ByNextn  # acceptance lengths
    engines: list[CpuEngine]

    @property
    def checkpoint_bytes(self) -> int:
        return sum(portion.bytes for portion in self.portions.values())

    def speeds(self, engine: CpuEngine) -> list[float | None]:
        """Return one user's tokens/s for each nextn, if a step only reads memory.

        With --memory it also reads what memory does not hold from a disk. None: the engine does
        not fit here.
        """
        if not engine.fits and self.request.memory is None:
            return [None] * len(engine.reads)
        disk = 1e9 * self.request.disk_bandwidth
        lengths = [self.lengths[nextn] for nextn in self.request.nextn]
        return [
            min(tokens * self.bandwidth / read, tokens * disk / missing if missing else math.inf)
            for tokens, read, missing in zip(lengths, engine.reads, engine.missing, strict=True)
        ]

    @property
    def shares_disk(self) -> bool:
        """Whether engine and download need room on the same disk."""
        return self.download > 0 and self.machine.downloads.device == self.machine.engines.device


def forecast_cpu(request: ForecastRequest, machine: Machine | None = None) -> CpuForecast:
    """Forecast for `machine` or this one; raise UsageError, BuildError or CheckpointError."""
    machine = machine or measure_machine()
    if request.bandwidth is not None and not request.bandwidth > 0:
        raise UsageError(f"--bandwidth {request.bandwidth:g} must be above 0")
    if not request.disk_bandwidth > 0:
        raise UsageError(f"--disk-bandwidth {request.disk_bandwidth:g} must be above 0")
    if request.memory is not None:
        if not 0 < request.memory < math.inf:
            raise UsageError(f"--memory {request.memory:g} must be above 0")
        memory = round(1e9 * request.memory)
        machine = replace(machine, memory=memory, available=memory)
    request, layout = resolve_request(request, CACHE_DTYPES)
    lengths = choose_acceptance_lengths(request)
    sizes = sum_portions(layout, count_classes(layout, ALONE))
    download = sum(portion.bytes for portion in sizes.values()) if needs_download(request) else 0
    models = {weights: make_engine_model(layout, build_scheme(weights)) for weights in ASKED}
    engines = [
        forecast_engine(request, weights, model, download, machine)
        for weights, model in models.items()
        if request.cache_dtype == CACHE_DTYPES[0] or any(c.format in FORMATS for c in model.classes)
    ]
    return CpuForecast(
        request=request,
        name=layout.name,
        model=models[None],
        portions=sizes,
        download=download,
        machine=machine,
        bandwidth=1e9 * request.bandwidth if request.bandwidth else measure_bandwidth(),
        lengths=lengths,
        engines=engines,
    )


def needs_download(request: ForecastRequest) -> bool:
    model = name_model(request.model)
    if request.checkpoint is not None and not has_weights(request.checkpoint):
        return True
    return (
        request.checkpoint is None and model.repository is not None and model.find_weights() is None
    )


def make_engine_model(layout: CheckpointLayout, scheme: Scheme | None) -> CostModel:
    """Return the model as an engine holds it, on a machine of unknown speed."""
    config = layout.config
    style = GraphStyle(formats=(*FORMATS, "mxfp4"), rounds_to="int8", pipeline=CPU)
    format_of = layout.format if scheme is None else partial(format_by, scheme, config)
    classes = count_engine_classes(config, format_of, style)
    if computes_all_experts(config):  # count them like other weights
        for weights in classes:
            weights.name = weights.name.replace("experts", "computed experts")
    return CostModel(config, classes, ALONE, UNKNOWN)


def forecast_engine(
    request: ForecastRequest,
    weights: str | None,
    model: CostModel,
    download: int,
    machine: Machine,
) -> CpuEngine:
    file = count_file_bytes(model.classes)
    caches = [count_cache_bytes(request, model, nextn) for nextn in request.nextn]
    memory = [round(MAPPED * file) + cache for cache in caches]
    load = StepLoad(request.max_batch, request.context_len, request.cache_dtype)
    reads = [sum(part.bytes for part in model.step(nextn, load)) for nextn in request.nextn]
    rooms = [machine.available - cache for cache in caches]
    missing = [
        count_missing_bytes(model, nextn, load, room)
        for nextn, room in zip(request.nextn, rooms, strict=True)
    ]
    too_much = max(0, max(memory) - machine.available)
    limit = model.config.max_position_embeddings

    def state_bytes(context: int) -> int:
        return count_cache_bytes(replace(request, max_seq_len=context), model, max(request.nextn))

    context = choose_context(limit, machine.memory, file, state_bytes)
    lacking = machine.lacking(download, file)
    return CpuEngine(weights, file, memory, reads, missing, too_much, lacking, context)


def count_missing_bytes(model: CostModel, nextn: int, load: StepLoad, room: int) -> float:
    """Count the least bytes that a step reads from a disk, if memory has room for so many.

    Memory holds what every step reads, and then experts of the main model, all equally likely.
    """
    parts = [part for part in model.step(nextn, load) if not part.name.endswith(IN_CACHES)]
    chosen = sum(part.bytes for part in parts if part.name == EXPERTS)
    always = sum(part.bytes for part in parts) - chosen
    experts = sum(c.per_rank for c in model.classes if c.name == EXPERTS and not c.module)
    absent = max(0.0, 1 - max(0.0, room - always) / experts) if experts else 0.0
    return max(0.0, always - room) + absent * chosen


def count_cache_bytes(request: ForecastRequest, model: CostModel, nextn: int) -> int:
    """Count the bytes of all requests' cache rows, windows included.

    Recurrent states count twice: a step reads one copy and writes the other.
    """
    row = model.cache_bytes(nextn, request.cache_dtype)
    capacity = request.max_seq_len + nextn + 1
    rings = model.ring_bytes(nextn, request.cache_dtype, request.prefill_chunk, capacity)
    return request.max_batch * (capacity * row + rings + 2 * model.state_bytes)


def make_cpu_plan_json(f: CpuForecast) -> dict[str, Any]:
    """Make the JSON, in bytes; lists are over `nextn`.

    docs/plan.md explains each key.
    """
    request = f.request
    model = f.model
    machine = f.machine
    return {
        "model": f.name,
        "target": "onnxruntime",
        **make_load_json(request, model, f.lengths),
        "portions": [{"name": name, **asdict(part)} for name, part in f.portions.items()],
        "checkpoint_bytes": f.checkpoint_bytes,
        "download_bytes": f.download,
        "memory_bytes": machine.memory,
        "memory_available_bytes": machine.available,
        "disk_free_bytes": {"downloads": machine.downloads.free, "engines": machine.engines.free},
        "bandwidth_bytes_per_s": f.bandwidth,
        "kv_bytes_per_token": [
            model.cache_bytes(nextn, request.cache_dtype) for nextn in request.nextn
        ],
        "kv_bytes": [count_cache_bytes(request, model, nextn) for nextn in request.nextn],
        "engines": [
            {
                "weights": engine.name,
                "engine_bytes": engine.bytes,
                "memory_bytes": engine.memory,
                "bytes_per_step": engine.reads,
                "missing_bytes_per_step": engine.missing,
                "tokens_per_s": f.speeds(engine),
                "fits_memory": not engine.too_much,
                "fits_disk": not engine.lacking,
                "context": engine.context,
            }
            for engine in f.engines
        ],
    }


def print_cpu_forecast(f: CpuForecast) -> None:
    """Print the checkpoint's parts, and for each --weights the engine, its reads and its speed."""
    request = f.request
    machine = f.machine
    nextn = f.request.nextn[-1]
    whose = "this" if request.memory is None else "another"
    print_lines(
        f"{f.name} on {whose} machine's CPU: memory {format_size(machine.memory)}, of it "
        f"{format_size(machine.available)} available"
    )
    parts = [
        (name, f"{portion.parameters / 1e9:.4g} B", format_size(portion.bytes))
        for name, portion in f.portions.items()
        if portion.parameters
    ]
    print_table([("checkpoint", "parameters", "size"), *parts])
    free = f"{format_size(machine.downloads.free)} free there"
    place = f"{format_size(f.download)} to {cache_folder()}, {free}"
    print_lines(f"download: {place if f.download else 'nothing'}")
    head = ("--weights", "engine", f"memory, nextn {nextn}", "fits", "context")
    rows = [
        (
            engine.name,
            format_size(engine.bytes),
            format_size(engine.memory[-1]),
            describe_fit(engine),
            f"{engine.context:,}",
        )
        for engine in f.engines
    ]
    print_table([head, *rows], texts=("fits",))
    shared = ", of which the download takes its part" if f.shares_disk else ""
    print_lines(
        f"memory: {MAPPED:g} times the engine, as measured (docs/plan.md), and caches: "
        f"{f.model.cache_bytes(nextn, request.cache_dtype):,} bytes per token "
        f"({request.cache_dtype}), {format_size(count_cache_bytes(request, f.model, nextn))} for "
        f"--max-batch {request.max_batch} of --max-seq-len {request.max_seq_len}; `mtpbuild serve` "
        f"keeps rows of ended requests besides, in at most 1/{SHARE} of what is then free "
        "(--prefix-cache-bytes)",
        f"disk of this folder: {format_size(machine.engines.free)} free{shared}",
    )
    columns = [str(nextn) for nextn in request.nextn]
    reads = [(e.name, *(f"{bytes / 1e9:.3f}" for bytes in e.reads)) for e in f.engines]
    print_table([("GB per step", *columns), *reads])
    print_lines(
        f"by nextn; {request.max_batch} at once, each with {request.context_len:,} cached tokens; "
        "routed experts: those that the tokens choose, if all are equally likely"
    )
    speeds = [(e.name, *map(format_speed, f.speeds(e))) for e in f.engines]
    print_table([("tokens/s, most", *columns), *speeds])
    measured = "given" if request.bandwidth else "measured now, all cores"
    lengths = "given" if request.acceptance else "DeepSeek-R1's, published"
    print_lines(
        f"by nextn, of one user, if a step did nothing but read these bytes from memory, at "
        f"{f.bandwidth / 1e9:.3g} GB/s ({measured}); arithmetic, prompts and other programs take "
        f"their part. Acceptance lengths: {lengths}"
    )
    if request.memory is not None:
        print_lines(
            f"Where memory does not hold an engine: if its missing bytes come from a disk of "
            f"{request.disk_bandwidth:g} GB/s (--disk-bandwidth), all experts equally likely"
        )


def describe_fit(engine: CpuEngine) -> str:
    lacks = {"memory": engine.too_much, "disk": engine.lacking}
    missing = ", ".join(f"{format_size(size)} of {what}" for what, size in lacks.items() if size)
    return f"no, lacks {missing}" if missing else "yes"


def format_speed(tokens_per_s: float | None) -> str:
    """Return a speed of three digits; a dash if there is none."""
    return "-" if tokens_per_s is None else f"{float(f'{tokens_per_s:.3g}'):,g}"
