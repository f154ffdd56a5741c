"""Prediction of sizes, step times and tokens per second of a model on a machine.

A step takes base + per_draft * nextn + roofline. At batch 1 the first two, its latency, are most of
it: launches, synchronisation and the all-reduces of 61 layers. They are fitted to two measurements.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mtpbuild.builder.flags import PlanFlags
from mtpbuild.builder.models import ModelConfig, find_family_of
from mtpbuild.builder.models.ranks import check_ranks
from mtpbuild.builder.plan.plan import check_cache_rows, choose_drafter
from mtpbuild.builder.plan.weight_classes import (
    CheckpointLayout,
    WeightClass,
    count_classes,
    find_layout,
    sum_portions,
)
from mtpbuild.builder.targets.tensorrt import PROGRAMS, TARGET
from mtpbuild.lab.forecast.machines import find_gpu
from mtpbuild.lab.forecast.step import CostModel, StepLoad, StepPart, count_distinct_experts
from mtpbuild.runtime.checks import check_one_of
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.ranks import Ranks

ByNextn = Mapping[int, float]
USUAL_NEXTN = (0, 1, 2, 3, 4, 5)
GPU_CACHES = ("bfloat16", "float32")  # of the targets for GPUs; auto: the first
RESERVED = 0.08  # share of a GPU's memory for driver, kernels, communication buffers, graphs
# TensorRT-LLM's blog 1: 8 B200, batch 1, 1K tokens in and 2K out, so 2,048 cached on average.
PUBLISHED = ("deepseek-r1-fp4", "b200", Ranks(tp=8), 1, 2048)
PUBLISHED_ACCEPTANCE = (1.00, 1.92, 2.58, 2.82, 2.99, 3.01)  # nextn 0..5
PUBLISHED_SPEED = (111.0, 198.0, 250.0, 253.0, 245.0, 239.0)  # tokens/s of one user


@dataclass(frozen=True)
class Latency:
    """The constant seconds of each step, and of each of its drafts."""

    base: float
    per_draft: float
    source: str

    def seconds(self, nextn: int) -> float:
        return self.base + self.per_draft * nextn


def fit_latency(points: list[tuple[int, float, float]], source: str) -> Latency:
    """Fit two points: (nextn, measured seconds of a step, roofline seconds of its parts)."""
    (n0, step0, parts0), (n1, step1, parts1) = points
    rest0, rest1 = step0 - parts0, step1 - parts1
    per_draft = (rest1 - rest0) / (n1 - n0)
    base = rest0 - per_draft * n0
    if base < 0:
        raise UsageError(
            f"--measured: these speeds are beyond the machine's memory and arithmetic "
            f"(nextn {n0}: {1e3 * step0:.2f} ms measured, {1e3 * parts0:.2f} ms at least)"
        )
    return Latency(base, per_draft, source)


def parse_measured(text: str) -> dict[int, float]:
    """Parse `0=111,1=198`: tokens/s of one user at two nextn."""
    match = re.fullmatch(r"(\d+)=(\d+\.?\d*),(\d+)=(\d+\.?\d*)", text.replace(" ", ""))
    speeds = {int(match[i]): float(match[i + 1]) for i in (1, 3)} if match else {}
    if len(speeds) < 2 or 0 in speeds.values():
        example = "tokens/s at two different nextn, such as 0=111,1=198"
        raise UsageError(f"--measured {text!r}: give {example}")
    return speeds


@dataclass(frozen=True)
class ForecastRequest(PlanFlags):
    """The flags of `mtpbuild plan`."""

    model: str
    nextn: tuple[int, ...]  # empty: 0 to 5, or 0 alone if there is no MTP module
    ranks: Ranks = field(default_factory=Ranks)
    acceptance: tuple[float, ...] | None = None
    measured: ByNextn | None = None  # tokens/s of one user at two nextn


@dataclass(frozen=True)
class StepForecast:
    """A step of one nextn: its parts, the latency added to them, and the speed of one user."""

    nextn: int
    acceptance: float
    parts: list[StepPart]
    latency: float

    @property
    def roofline(self) -> float:
        """The seconds that memory and arithmetic need."""
        return sum(part.seconds for part in self.parts)

    @property
    def bytes(self) -> float:
        return sum(part.bytes for part in self.parts)

    @property
    def operations(self) -> float:
        return sum(part.operations for part in self.parts)

    @property
    def seconds(self) -> float:
        return self.latency + self.roofline

    @property
    def tokens_per_s(self) -> float:
        return self.acceptance / self.seconds

    @property
    def limit(self) -> str:
        """The limit that takes most of the step's time."""
        times = {"latency": self.latency, "memory": 0.0, "compute": 0.0}
        for part in self.parts:
            times[part.limit] += part.seconds
        return max(times, key=lambda name: times[name])


@dataclass(frozen=True)
class Forecast:
    """The figures of `mtpbuild plan`; sizes are per rank and for the largest nextn."""

    request: ForecastRequest
    name: str
    model: CostModel
    checkpoint_bytes: int
    weight_bytes: float
    cache_bytes: int
    scratch_bytes: float
    latency: Latency
    steps: list[StepForecast]
    without: StepForecast  # with nextn 0

    @property
    def is_published(self) -> bool:
        """Whether speeds of exactly this setting are published."""
        request = self.request
        load = (request.max_batch, request.context_len)
        setting = (self.name, self.model.gpu.name, request.ranks, *load)
        return request.acceptance is None and setting == PUBLISHED

    @property
    def free_bytes(self) -> float:
        """The bytes left for caches; negative if the model does not fit."""
        return self.model.gpu.memory * (1 - RESERVED) - self.weight_bytes - self.scratch_bytes

    @property
    def tensorrt_bytes(self) -> float:
        """The bytes of weights that an engine of target tensorrt holds on a rank.

        The weights that our kernels read are shared by its programs.
        """
        drafts = max(self.request.nextn)
        ranks = self.request.ranks
        used = [weights for weights in self.model.classes if drafts or not weights.module]
        joined = () if ranks.ep > 1 or ranks.attention_dp else ("shared experts",)
        names = ("experts", "head", *joined)
        shared = sum(weights.per_rank for weights in used if weights.name in names)
        return shared + PROGRAMS * (self.weight_bytes - shared)

    @property
    def cache_tokens(self) -> int:
        return max(0, int(self.free_bytes // self.cache_bytes))

    @property
    def needed_tokens(self) -> int:
        """The cache rows of one rank's requests, windows included."""
        request = self.request
        rows = request.max_seq_len + max(request.nextn) + 1
        return request.ranks.local(request.max_batch) * rows

    @property
    def speedups(self) -> list[float]:
        """Each nextn's speed relative to nextn 0, whether or not 0 was requested."""
        return [step.tokens_per_s / self.without.tokens_per_s for step in self.steps]

    @property
    def fits(self) -> bool:
        return self.free_bytes >= 0 and self.cache_tokens >= self.needed_tokens


def forecast(request: ForecastRequest) -> Forecast:
    """Make the forecast; raise UsageError for contradictory flags, CheckpointError."""
    gpu = find_gpu(request.gpu)
    request, layout = resolve_request(request, GPU_CACHES)
    request.ranks.check(layout.config.n_routed_experts)
    if (tp := request.ranks.tp) > gpu.ranks:
        raise UsageError(f"--tp {tp}: a {gpu.name} machine has {gpu.ranks} GPUs")
    lengths = choose_acceptance_lengths(request)
    classes = count_gpu_classes(layout, request.ranks)
    formats = {weights.name: weights.format for weights in classes if not weights.module}
    if not has_one_rank(layout.config):
        check_ranks(layout.config, request.ranks, formats, gpu.ranks)
    model = CostModel(layout.config, classes, request.ranks, gpu)
    load = StepLoad(request.max_batch, request.context_len, request.cache_dtype)
    latency = fit_measured(request, model, load, lengths)
    max_nextn = max(request.nextn)
    return Forecast(
        request=request,
        name=layout.name,
        model=model,
        checkpoint_bytes=sum(p.bytes for p in sum_portions(layout, classes).values()),
        weight_bytes=model.weight_bytes(max_nextn),
        cache_bytes=model.cache_bytes(max_nextn, load.cache),
        scratch_bytes=model.scratch_bytes(
            max_nextn, request.max_batch, request.prefill_chunk, request.max_seq_len
        ),
        latency=latency,
        steps=[
            StepForecast(n, lengths[n], model.step(n, load), latency.seconds(n))
            for n in request.nextn
        ],
        without=StepForecast(0, 1.0, model.step(0, load), latency.seconds(0)),
    )


def count_gpu_classes(layout: CheckpointLayout, ranks: Ranks) -> list[WeightClass]:
    """Count the weights as the engines of the targets for GPUs hold them.

    Those of a family without such engines, which have one rank, count as they are stored.
    """
    return count_classes(layout, ranks, None if has_one_rank(layout.config) else TARGET.style)


def has_one_rank(config: ModelConfig) -> bool:
    """Return whether ranks can't share the model's engines, whatever their number is."""
    splits = find_family_of(config).split_sizes(config, Ranks())
    return any(split.size == 1 for split in splits)


def resolve_request(
    request: ForecastRequest, caches: Sequence[str]
) -> tuple[ForecastRequest, CheckpointLayout]:
    """Check the flags and find the model's layout; fill in the usual nextn and type of caches."""
    for name in ("max_seq_len", "max_batch", "context_len", "prefill_chunk"):
        if (value := getattr(request, name)) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value} must be at least 1")
    dtype = caches[0] if request.cache_dtype == "auto" else request.cache_dtype
    check_one_of(dtype, caches, "--cache-dtype")
    layout = find_layout(request.model, request.checkpoint)
    check_cache_rows(layout.config, dtype)
    usual = USUAL_NEXTN if layout.config.num_nextn_predict_layers else (0,)
    request = replace(request, nextn=request.nextn or usual, cache_dtype=dtype)
    for nextn in request.nextn:
        choose_drafter(layout.config, nextn, None)
    return request, layout


def choose_acceptance_lengths(request: ForecastRequest) -> ByNextn:
    """Take each nextn's acceptance length from the request, or R1's published ones."""
    lengths = request.acceptance
    known = PUBLISHED_ACCEPTANCE
    if lengths is None:
        for nextn in request.nextn:
            if nextn >= len(known):
                problem = f"no acceptance length is published for nextn {nextn}"
                raise UsageError(f"{problem}: give --acceptance, a length for each nextn")
        lengths = tuple(known[nextn] for nextn in request.nextn)
    if len(lengths) != len(request.nextn):
        raise UsageError(f"--acceptance has {len(lengths)} lengths, --nextn {len(request.nextn)}")
    for nextn, length in zip(request.nextn, lengths, strict=True):
        if not 1 <= length <= nextn + 1:
            raise UsageError(f"--acceptance {length:g}: nextn {nextn} gives 1..{nextn + 1} tokens")
    return dict(zip(request.nextn, lengths, strict=True))


def make_load_json(request: ForecastRequest, model: CostModel, lengths: ByNextn) -> dict[str, Any]:
    """Make the fields that plans for CPUs and for GPUs share: the load, and lists over nextn."""
    names = ("max_batch", "max_seq_len", "context_len", "cache_dtype")
    tokens = [request.max_batch * (nextn + 1) for nextn in request.nextn]
    return {name: getattr(request, name) for name in names} | {
        "nextn": list(request.nextn),
        "acceptance_lengths": [lengths[nextn] for nextn in request.nextn],
        "distinct_experts": [count_distinct_experts(model.costs, count) for count in tokens],
    }


def fit_measured(
    request: ForecastRequest, model: CostModel, load: StepLoad, lengths: ByNextn
) -> Latency:
    """Fit the latency to the user's two measurements, or to the published ones."""
    if request.measured is None:
        return fit_published_latency()
    if missing := request.measured.keys() - lengths.keys():
        raise UsageError(f"--measured: nextn {min(missing)} is not among --nextn")
    return fit_to_speeds(model, load, request.measured, lengths, "fitted to --measured")


def fit_to_speeds(
    model: CostModel, load: StepLoad, speeds: ByNextn, lengths: ByNextn, source: str
) -> Latency:
    """Fit the constants that make a model's steps as fast as measured."""
    points = []
    for nextn, tokens_per_s in speeds.items():
        roofline = sum(part.seconds for part in model.step(nextn, load))
        points.append((nextn, lengths[nextn] / tokens_per_s, roofline))
    return fit_latency(points, source)


@functools.cache
def fit_published_latency() -> Latency:
    """Fit nextn 0 and 1 of the published series; the rest of it checks the prediction."""
    name, gpu, ranks, batch, context = PUBLISHED
    layout = find_layout(name, None)
    model = CostModel(layout.config, count_gpu_classes(layout, ranks), ranks, find_gpu(gpu))
    speeds = {nextn: PUBLISHED_SPEED[nextn] for nextn in (0, 1)}
    lengths = dict(enumerate(PUBLISHED_ACCEPTANCE))
    source = "nextn 0 and 1 of deepseek-r1-fp4 on 8 B200, batch 1"
    return fit_to_speeds(model, StepLoad(batch, context, "bfloat16"), speeds, lengths, source)
