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
        models = self._models
        rows: list[Any]
        loaded = [(model, model.stats) for model in models if model.stats is not None]
        for name, (field, about) in GAUGES.items():
            read = attrgetter(field)
            rows = [(model.labels, read(stats)) for model, stats in loaded]
            yield _fill_family(GaugeMetricFamily, name, about, rows)
        for name, (field, about) in totals.COUNTERS.items():
            rows = [(model.labels, model.counts[field, 0]) for model in models]
            yield _fill_family(CounterMetricFamily, name, about, rows)
        about, rows = "Always 0: a request keeps its slot.", [(m.labels, 0) for m in models]
        yield _fill_family(CounterMetricFamily, "num_preemptions", about, rows)
        for name, (about, _) in totals.HISTOGRAMS.items():
            histograms = [(model.labels, model.totals.histograms[name]) for model in models]
            rows = [
                (labels, _fill_buckets(h.bounds, h.cumulative), h.sum) for labels, h in histograms
            ]
            yield _fill_family(HistogramMetricFamily, name, about, rows)
        about = "Tokens that a step filled in and emitted."
        rows = [(model.labels, *_fill_step_buckets(model)) for model in models]
        yield _fill_family(HistogramMetricFamily, "iteration_tokens_total", about, rows)
        name, about = "spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by position."
        rows = [
            ([*model.labels, str(position)], accepted)
            for model in models
            for (kind, position), accepted in sorted(model.counts.items())
            if kind == totals.POSITION
        ]
        yield _fill_family(CounterMetricFamily, name, about, rows, "position")
        name, about = "request_success", "Requests that ended, by finish reason."
        ended = [(model.labels, sorted(model.totals.ended.items())) for model in models]
        rows = [([*labels, reason], n) for labels, counts in ended for reason, n in counts]
        yield _fill_family(CounterMetricFamily, name, about, rows, "finished_reason")
        about = "The caches: a slot is what vLLM calls a block, with so many tokens."
        builds = [(model.labels, model.build) for model, _ in loaded]
        rows = [([*labels, str(b.max_seq_len), str(b.slots)], 1) for labels, b in builds]
        more = ("block_size", "num_gpu_blocks")
        yield _fill_family(GaugeMetricFamily, "cache_config_info", about, rows, *more)


def _fill_family(kind: Any, name: str, about: str, rows: Iterable[Any], *labels: str) -> Any:
    """Return a family of metrics; a row has its labels and its value or values."""
    family = kind(f"vllm:{name}", about, labels=(*LABELS, *labels))
    for row in rows:
        family.add_metric(*row)
    return family


def _fill_buckets(bounds: Iterable[float], counts: Iterable[int]) -> list[tuple[str, int]]:
    """Return a histogram's buckets; counts: of values up to each bound, and of all."""
    return [*zip([*(str(float(bound)) for bound in bounds), "+Inf"], counts, strict=True)]


def _fill_step_buckets(model: MeteredModel) -> tuple[list[tuple[str, int]], int]:
    """Return the buckets of steps by their tokens, and the sum of these tokens."""
    steps = {tokens: n for (kind, tokens), n in model.counts.items() if kind == totals.STEP}
    counts = [sum(n for t, n in steps.items() if t <= bound) for bound in (*STEPS, inf)]
    return _fill_buckets(STEPS, counts), sum(tokens * n for tokens, n in steps.items())
