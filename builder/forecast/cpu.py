"""Prediction of the download, disk, memory and bytes read of onnxruntime's engines on a CPU.

Whatever its nextn, an engine holds every weight of the main model and of the MTP modules. The
weights that `build --weights` quantises are integers, all others fp32.
"""

from dataclasses import dataclass, replace

from mtpbuild.builder.forecast.forecast import (
    ByNextn,
    ForecastRequest,
    choose_acceptance_lengths,
    resolve_request,
)
from mtpbuild.builder.forecast.machines import UNKNOWN
from mtpbuild.builder.forecast.step import CostModel, StepLoad
from mtpbuild.builder.forecast.weights import (
    TIED,
    CheckpointPortion,
    Layout,
    count_classes,
    sum_portions,
)
from mtpbuild.builder.host import Machine, measure_bandwidth, measure_machine
from mtpbuild.builder.models import family_of
from mtpbuild.builder.models.common.moe_config import DENSE_EXPERTS
from mtpbuild.builder.recipe import name_model
from mtpbuild.builder.weights.formats import INT8, Format, Integers
from mtpbuild.builder.weights.made import WHOLE, Stored
from mtpbuild.builder.weights.requantised import format_by
from mtpbuild.builder.weights.scheme import Scheme, build_scheme
from mtpbuild.runtime.cpu_library import find_library
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.ranks import ALONE

# Values of --weights; None: integers as the checkpoint has them, or fp32.
ASKED = (None, "int8", "int4")

# Bytes of memory at run time for each byte of the weights file. Our kernels read the memory-mapped
# file, once for all sessions. With a file of 1.41 GB, nextn 1 and requests that sample, an engine
# took 1.33 GB (its share of the pages), 0.11 GB of it private.
MAPPED = 1.1
# Each session of onnxruntime's own operators (prefill, decode) packs its own copy. Engines of 8.76
# GB were measured at 19.0 GB (2.17) and 20.4 GB (2.33), one of 1.49 GB at 3.51 GB (2.36).
PACKED = 2.4


@dataclass(frozen=True)
class CpuEngine:
    """The engine that `build --weights` would make; lists are over the request's nextn.

    bytes: the size of the weights file.
    """

    weights: str | None
    bytes: int
    memory: list[int]
    reads: list[float]
    too_much: int  # bytes of memory that the largest nextn needs beyond the machine's
    lacking: int  # bytes of disk space that are missing

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

        None: the engine does not fit.
        """
        pairs = zip(self.request.nextn, engine.reads, strict=True)
        found = [self.lengths[nextn] * self.bandwidth / bytes for nextn, bytes in pairs]
        return [speed if engine.fits else None for speed in found]

    @property
    def shares_disk(self) -> bool:
        """Return whether engine and download need room on the same disk."""
        return self.download > 0 and self.machine.downloads.device == self.machine.engines.device


def forecast_cpu(request: ForecastRequest, machine: Machine | None = None) -> CpuForecast:
    """Make the forecast; raise UsageError, BuildError or CheckpointError.

    machine: this machine if it is not given.
    """
    machine = machine or measure_machine()
    if request.bandwidth is not None and not request.bandwidth > 0:
        raise UsageError(f"--bandwidth {request.bandwidth:g} must be above 0")
    request, layout = resolve_request(request)
    lengths = choose_acceptance_lengths(request)
    sizes = sum_portions(layout, count_classes(layout, ALONE))
    fetched = needs_download(request)
    download = sum(portion.bytes for portion in sizes.values()) if fetched else 0
    models = {weights: engine_model(layout, build_scheme(weights)) for weights in ASKED}
    engines = [
        forecast_engine(request, weights, model, factor(), download, machine)
        for weights, model in models.items()
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
    given = request.checkpoint is not None or model.repository is None
    return not given and model.find_weights() is None


def engine_model(layout: Layout, scheme: Scheme | None) -> CostModel:
    """Return the model as an engine holds it, on a machine of unknown speed."""
    by_head = weights_by_head(layout, scheme)

    def format(stored: Stored) -> Format | None:
        return INT8 if stored.name in by_head else engine_format(layout, stored, scheme)

    held = replace(layout, format=format, plain=lambda stored: "F32", repeated=False)
    found = count_classes(held, ALONE)
    if layout.config.n_routed_experts <= DENSE_EXPERTS:
        for one in found:  # with so few experts all are computed, whichever are chosen
            one.name = one.name.replace("experts", "computed experts")
    return CostModel(layout.config, found, ALONE, UNKNOWN)


def weights_by_head(layout: Layout, scheme: Scheme | None) -> set[str]:
    """Return the checkpoint's weights that an engine holds in int8 by head, for our kernels."""
    table = family_of(layout.config).weight_table(layout.config, WHOLE)
    every = (stored for weight in table for stored in weight.stored)
    integers = scheme is not None or any(isinstance(layout.format(s), Integers) for s in every)
    if not integers or find_library() is None:
        return set()
    return {stored.name for weight in table if weight.wide_heads for stored in weight.stored}


def factor() -> float:
    """Return the bytes of memory for each byte of an engine that is built here."""
    return PACKED if find_library() is None else MAPPED


def engine_format(layout: Layout, stored: Stored, scheme: Scheme | None) -> Format | None:
    """Return the format in which an engine holds a weight of the checkpoint; None: fp32."""
    if scheme is not None:
        return format_by(scheme, layout.config, stored)
    format = layout.format(stored)
    return format if isinstance(format, Integers) else None


def forecast_engine(
    request: ForecastRequest,
    weights: str | None,
    model: CostModel,
    factor: float,
    download: int,
    machine: Machine,
) -> CpuEngine:
    file = count_engine_bytes(model)
    caches = [count_cache_bytes(request, model, nextn) for nextn in request.nextn]
    memory = [round(factor * file) + cache for cache in caches]
    load = StepLoad(request.max_batch, request.context_len, "fp32")
    reads = [sum(part.bytes for part in model.step(nextn, load)) for nextn in request.nextn]
    too_much = max(0, max(memory) - machine.available)
    return CpuEngine(weights, file, memory, reads, too_much, machine.lacking(download, file))


def count_engine_bytes(model: CostModel) -> int:
    """Count the bytes of the weights file, which has a head tied to the embedding twice."""
    return sum(one.bytes * (2 if one.name == TIED else 1) for one in model.classes)


def count_cache_bytes(request: ForecastRequest, model: CostModel, nextn: int) -> int:
    """Count the bytes of all requests' cache rows, windows included, in fp32.

    Recurrent states count twice: a step reads one copy and writes the other.
    """
    rows = request.max_seq_len + nextn + 1
    return request.max_batch * (rows * model.cache_bytes(nextn, "fp32") + 2 * model.state_bytes)
