"""Prometheus metrics for `/metrics`, under vLLM's names, so that dashboards for vLLM work."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from mtpbuild.runtime.contract.manifest import BuildInfo
from mtpbuild.runtime.requests.stats import EngineStats

FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
WHOLE = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEPS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
LABELS = ("model_name", "engine")


class Metrics:
    """Counters and histograms of requests; the engine's own counts are read on demand."""

    def __init__(self, model: str, build: BuildInfo, stats: Callable[[], EngineStats]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self._registry.register(EngineCollector(stats, [model, "0"]))
        ProcessCollector(registry=self._registry)
        sizes = _sizes(build.max_seq_len)
        histogram = self._histogram
        self.first_token = histogram(
            "time_to_first_token_seconds", "Seconds from a request to its first token.", FIRST
        )
        self.between = histogram(
            "inter_token_latency_seconds", "Seconds from one step's tokens to the next.", BETWEEN
        )
        self.per_token = histogram(
            "request_time_per_output_token_seconds",
            "Seconds per token of a request after its first one.",
            BETWEEN,
        )
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds", "Seconds from a request to its last token.", WHOLE
        )
        self.queued = histogram(
            "request_queue_time_seconds", "Seconds in which a request waited for a slot.", WHOLE
        )
        self.prefill = histogram(
            "request_prefill_time_seconds", "Seconds from the slot to the first token.", WHOLE
        )
        self.decode = histogram(
            "request_decode_time_seconds", "Seconds from the first token to the last.", WHOLE
        )
        self.inference = histogram(
            "request_inference_time_seconds", "Seconds from the slot to the last token.", WHOLE
        )
        self.prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", sizes)
        self.generated = histogram("request_generation_tokens", "Tokens of an answer.", sizes)
        self.requested_choices = histogram(
            "request_params_n", "Choices that a request asks for.", CHOICES
        )
        self.requested_tokens = histogram(
            "request_params_max_tokens", "Tokens that an answer may have at most.", sizes
        )
        self._ended = Counter(
            "vllm:request_success",
            "Requests that ended, by finish reason.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        capacity = {"block_size": str(build.max_seq_len), "num_gpu_blocks": str(build.slots)}
        Gauge(
            "vllm:cache_config_info",
            "The caches: a slot is what vLLM calls a block, with so many tokens.",
            ("engine", *capacity),
            registry=self._registry,
        ).labels(engine="0", **capacity).set(1)

    def count_finished(self, reason: str) -> None:
        self._ended.labels(**self._labels, finished_reason=reason).inc()

    def text(self) -> tuple[bytes, str]:
        """Return Prometheus's text format and its media type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def _histogram(self, name: str, about: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(
            f"vllm:{name}", about, LABELS, registry=self._registry, buckets=buckets
        )
        return histogram.labels(**self._labels)


class EngineCollector(Collector):
    """A collector that reads the engine's own counts."""

    def __init__(self, stats: Callable[[], EngineStats], labels: list[str]) -> None:
        self._stats, self._labels = stats, labels

    def collect(self) -> Iterator[Any]:
        s = self._stats()
        drafting = s.speculative_decoding
        cached = "Tokens of prompts whose cache rows were there already."
        gauges = {
            "num_requests_running": ("Requests in slots.", s.requests_running),
            "num_requests_waiting": ("Requests that wait for a slot.", s.requests_waiting),
            "kv_cache_usage_perc": ("Share of all cache rows that are in use.", s.cache_usage),
            "prefix_pool_bytes": ("Memory of rows of earlier prompts.", s.prefix_bytes),
            "prefix_pool_limit_bytes": ("Memory that these may have.", s.prefix_limit),
        }
        counters = {
            "prompt_tokens": ("Tokens of prompts.", s.prompt_tokens),
            "generation_tokens": ("Tokens that requests got.", s.output_tokens),
            "prompt_tokens_cached": (cached, s.prefix_hits),
            "prefix_cache_queries": ("Tokens of prompts that were looked up.", s.prefix_queries),
            "prefix_cache_hits": (cached, s.prefix_hits),
            "num_preemptions": ("Always 0: a request keeps its slot.", 0),
            "spec_decode_num_drafts": ("Times that a request's drafts were judged.", s.num_drafts),
            "spec_decode_num_draft_tokens": ("Tokens drafted.", drafting.num_draft_tokens),
            "spec_decode_num_accepted_tokens": (
                "Drafts accepted.",
                drafting.num_accepted_draft_tokens,
            ),
        }
        for kind, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (about, value) in values.items():
                family = kind(f"vllm:{name}", about, labels=LABELS)
                family.add_metric(self._labels, value)
                yield family
        yield self._per_position(drafting.acceptance_histogram)
        yield self._per_step(s.step_tokens)

    def _per_position(self, histogram: Sequence[int]) -> CounterMetricFamily:
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        labels = (*LABELS, "position")
        family = CounterMetricFamily(name, "Drafts accepted, by position.", labels=labels)
        for position in range(len(histogram) - 1):
            family.add_metric([*self._labels, str(position)], sum(histogram[position + 1 :]))
        return family

    def _per_step(self, steps: Mapping[int, int]) -> HistogramMetricFamily:
        about = "Tokens that a step filled in and emitted."
        family = HistogramMetricFamily("vllm:iteration_tokens_total", about, labels=LABELS)
        buckets = [
            (str(float(most)), sum(count for tokens, count in steps.items() if tokens <= most))
            for most in (*STEPS, inf)
        ]
        buckets[-1] = ("+Inf", buckets[-1][1])
        family.add_metric(self._labels, buckets, sum(t * count for t, count in steps.items()))
        return family


def _sizes(most: int) -> list[float]:
    """Return the buckets 1, 2, 5, 10, .. up to `most`."""
    sizes = (factor * 10**power for power in range(9) for factor in (1, 2, 5))
    return [float(size) for size in sizes if size <= most]
