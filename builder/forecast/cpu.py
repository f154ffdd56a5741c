"""Prediction of the download, disk, memory and bytes read of onnxruntime's engines on a CPU.

Whatever its nextn, an engine holds every weight of the main model and of the MTP modules. The
weights that `build --weights` quantises are integers, all others fp32.
"""

from dataclasses import dataclass

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
    CheckpointLayout,
    CheckpointPortion,
    count_classes,
    in_engine,
    sum_portions,
)
from mtpbuild.builder.graph.pipelines import CPU
from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.measure.host import Machine, measure_bandwidth, measure_machine
from mtpbuild.builder.models.common.moe_config import DENSE_EXPERTS
from mtpbuild.builder.plan.recipe import name_model
from mtpbuild.builder.weights.scheme import Scheme, build_scheme
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.ranks import ALONE

# Values of --weights; None: integers as the checkpoint has them, or fp32.
FORMATS = ("int8", "int4")
ASKED = (None, *FORMATS)

# Bytes of memory at run time for each byte of the weights file. Our kernels read the memory-mapped
# file, once for all sessions. With a file of 1.41 GB, nextn 1 and requests that sample, an engine
# took 1.33 GB (its share of the pages), 0.11 GB of it private.
MAPPED = 1.1


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
        forecast_engine(request, weights, model, download, machine)
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


def engine_model(layout: CheckpointLayout, scheme: Scheme | None) -> CostModel:
    """Return the model as an engine holds it, on a machine of unknown speed."""
    style = GraphStyle(formats=FORMATS, pipeline=CPU)
    found = count_classes(in_engine(layout, scheme, style, ALONE, "F32"), ALONE)
    if layout.config.n_routed_experts <= DENSE_EXPERTS:
        for one in found:  # with so few experts all are computed, whichever are chosen
            one.name = one.name.replace("experts", "computed experts")
    return CostModel(layout.config, found, ALONE, UNKNOWN)


def forecast_engine(
    request: ForecastRequest,
    weights: str | None,
    model: CostModel,
    download: int,
    machine: Machine,
) -> CpuEngine:
    file = count_engine_bytes(model)
    caches = [count_cache_bytes(request, model, nextn) for nextn in request.nextn]
    memory = [round(MAPPED * file) + cache for cache in caches]
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
