"""Prometheus' text of engines' counts, under vLLM's names, so that dashboards for vLLM work."""

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from operator import attrgetter
from typing import Any

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from mtpbuild.runtime.requests import totals
from mtpbuild.runtime.requests.totals import MeteredModel

STEPS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens of a step
LABELS = ("model_name", "engine")
GAUGES = {  # name: field of EngineStats, and help
    "num_requests_running": ("requests_running", "Requests in slots."),
    "num_requests_waiting": ("requests_waiting", "Requests that wait for a slot."),
    "kv_cache_usage_perc": ("cache_usage", "Share of all cache rows that are in use."),
    "prefix_pool_bytes": ("prefix_bytes", "Memory of rows of earlier prompts."),
    "prefix_pool_limit_bytes": ("prefix_limit", "Memory that these may have."),
}


def write_metrics(models: Sequence[MeteredModel]) -> str:
    """Return Prometheus' text format, of type `CONTENT_TYPE_LATEST`, for one or more models."""
    prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = prometheus.CollectorRegistry()
    registry.register(ModelsCollector(models))
    prometheus.ProcessCollector(registry=registry)
    return prometheus.generate_latest(registry).decode()


class ModelsCollector(Collector):
    """A collector of several models' counts, each with its name as a label."""

    def __init__(self, models: Sequence[MeteredModel]) -> None:
        self._models = models

    def collect(self) -> Iterator[Any]:
        for name, (field, about) in GAUGES.items():
            read = attrgetter(field)
            each = [(model.labels, read(model.stats)) for model in self._models if model.stats]
            yield _fill_family(GaugeMetricFamily(f"vllm:{name}", about, labels=LABELS), each)
        for name, (field, about) in totals.COUNTERS.items():
            each = [(model.labels, model.counts[field, 0]) for model in self._models]
            yield _fill_family(CounterMetricFamily(f"vllm:{name}", about, labels=LABELS), each)
        about = "Always 0: a request keeps its slot."
        zeros = [(model.labels, 0) for model in self._models]
        yield _fill_family(CounterMetricFamily("vllm:num_preemptions", about, labels=LABELS), zeros)
        for name, (about, _) in totals.HISTOGRAMS.items():
            family = HistogramMetricFamily(f"vllm:{name}", about, labels=LABELS)
            for model in self._models:
                found = model.totals.histograms[name]
                _add_buckets(family, model, found.bounds, found.cumulative, found.sum)
            yield family
        yield self._count_steps()
        yield self._count_positions()
        yield self._count_ended()
        yield self._count_caches()

    def _count_steps(self) -> HistogramMetricFamily:
        about = "Tokens that a step filled in and emitted."
        family = HistogramMetricFamily("vllm:iteration_tokens_total", about, labels=LABELS)
        for model in self._models:
            steps = {n: count for (kind, n), count in model.counts.items() if kind == totals.STEP}
            counts = [
                sum(count for tokens, count in steps.items() if tokens <= most)
                for most in (*STEPS, inf)
            ]
            _add_buckets(family, model, STEPS, counts, sum(t * n for t, n in steps.items()))
        return family

    def _count_positions(self) -> CounterMetricFamily:
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        labels = (*LABELS, "position")
        family = CounterMetricFamily(name, "Drafts accepted, by position.", labels=labels)
        for model in self._models:
            for (kind, position), accepted in sorted(model.counts.items()):
                if kind == totals.POSITION:
                    family.add_metric([*model.labels, str(position)], accepted)
        return family

    def _count_ended(self) -> CounterMetricFamily:
        about, labels = "Requests that ended, by finish reason.", (*LABELS, "finished_reason")
        family = CounterMetricFamily("vllm:request_success", about, labels=labels)
        for model in self._models:
            for reason, count in sorted(model.totals.ended.items()):
                family.add_metric([*model.labels, reason], count)
        return family

    def _count_caches(self) -> GaugeMetricFamily:
        about = "The caches: a slot is what vLLM calls a block, with so many tokens."
        labels = (*LABELS, "block_size", "num_gpu_blocks")
        family = GaugeMetricFamily("vllm:cache_config_info", about, labels=labels)
        for model in self._models:
            if model.stats is None:
                continue
            sizes = str(model.build.max_seq_len), str(model.build.slots)
            family.add_metric([*model.labels, *sizes], 1)
        return family


def _fill_family(family: Any, values: Iterable[tuple[list[str], float]]) -> Any:
    for labels, value in values:
        family.add_metric(labels, value)
    return family


def _add_buckets(
    family: HistogramMetricFamily,
    model: MeteredModel,
    bounds: Sequence[float],
    counts: Sequence[int],
    total: float,
) -> None:
    """Add a model's histogram; counts: of values up to each bound, and of all."""
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    family.add_metric(model.labels, [*zip(names, counts, strict=True)], total)
