"""Prometheus metrics for `/metrics`, under vLLM's names, so that dashboards for vLLM work."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from mtpbuild.runtime.contract.manifest import BuildInfo
from mtpbuild.runtime.requests.stats import EngineStats, RequestMetrics

FIRST = (  # buckets in seconds, as in vLLM: up to the first token
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN = (  # between tokens
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
WHOLE = (  # of a whole request
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEPS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens of a step
TOKENS: Sequence[float] = ()  # stands for 1, 2, 5, 10, .. up to the engine's max_seq_len
LABELS = ("model_name", "engine")
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {  # name: help and buckets
    "time_to_first_token_seconds": ("Seconds from a request to its first token.", FIRST),
    "inter_token_latency_seconds": ("Seconds from one step's tokens to the next.", BETWEEN),
    "request_time_per_output_token_seconds": (
        "Seconds per token of a request after its first one.",
        BETWEEN,
    ),
    "e2e_request_latency_seconds": ("Seconds from a request to its last token.", WHOLE),
    "request_queue_time_seconds": ("Seconds in which a request waited for a slot.", WHOLE),
    "request_prefill_time_seconds": ("Seconds from the slot to the first token.", WHOLE),
    "request_decode_time_seconds": ("Seconds from the first token to the last.", WHOLE),
    "request_inference_time_seconds": ("Seconds from the slot to the last token.", WHOLE),
    "request_prompt_tokens": ("Tokens of a prompt.", TOKENS),
    "request_generation_tokens": ("Tokens of an answer.", TOKENS),
    "request_params_n": ("Choices that a request asks for.", (1.0, 2.0, 5.0, 10.0, 20.0)),
    "request_params_max_tokens": ("Tokens that an answer may have at most.", TOKENS),
}


class Metrics:
    """Counters and histograms of requests; the engine's own counts are read on demand."""

    def __init__(
        self, model: str, build: BuildInfo, stats: Callable[[], EngineStats | None]
    ) -> None:
        """stats: returns the engine's own counts; None while it is not loaded."""
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = prometheus.CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self._registry.register(EngineCollector(stats, [model, "0"]))
        sizes = [float(factor * 10**power) for power in range(9) for factor in (1, 2, 5)]
        sizes = [size for size in sizes if size <= build.max_seq_len]
        own: dict[str, Any] = {"labelnames": LABELS, "registry": self._registry}
        self._histograms = {
            name: prometheus.Histogram(f"vllm:{name}", about, buckets=buckets or sizes, **own)
            for name, (about, buckets) in HISTOGRAMS.items()
        }
        for histogram in self._histograms.values():
            histogram.labels(**self._labels)  # shown with zeros before the first request
        self._ended = prometheus.Counter(
            "vllm:request_success",
            "Requests that ended, by finish reason.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        capacity = {"block_size": str(build.max_seq_len), "num_gpu_blocks": str(build.slots)}
        prometheus.Gauge(
            "vllm:cache_config_info",
            "The caches: a slot is what vLLM calls a block, with so many tokens.",
            (*LABELS, *capacity),
            registry=self._registry,
        ).labels(**self._labels, **capacity).set(1)

    def observe(self, name: str, value: float) -> None:
        """Add a value to one of HISTOGRAMS."""
        self._histograms[name].labels(**self._labels).observe(value)

    def observe_request(self, ended: RequestMetrics) -> None:
        """Add the sizes and times of a request that has ended."""
        self.observe("request_prompt_tokens", ended.prompt_tokens)
        self.observe("request_generation_tokens", ended.output_tokens)
        if ended.queue_s is None or ended.ttft_s is None:
            return
        prefill = ended.ttft_s - ended.queue_s
        decode = (ended.tpot_s or 0) * (ended.output_tokens - 1)
        self.observe("request_queue_time_seconds", ended.queue_s)
        self.observe("request_prefill_time_seconds", prefill)
        self.observe("request_decode_time_seconds", decode)
        self.observe("request_inference_time_seconds", prefill + decode)
        if ended.tpot_s is not None:
            self.observe("request_time_per_output_token_seconds", ended.tpot_s)

    def count_finished(self, reason: str) -> None:
        self._ended.labels(**self._labels, finished_reason=reason).inc()

    def text(self, *others: "Metrics") -> bytes:
        """Return Prometheus's text format, of type `CONTENT_TYPE_LATEST`.

        others: of other models, with other labels.
        """
        registry = prometheus.CollectorRegistry()
        registry.register(MergedCollector([each._registry for each in (self, *others)]))
        prometheus.ProcessCollector(registry=registry)
        return prometheus.generate_latest(registry)


class MergedCollector(Collector):
    """A collector that joins what several registries have under one name, as Prometheus demands."""

    def __init__(self, registries: Sequence[prometheus.CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Any]:
        merged: dict[str, Any] = {}
        for family in (family for registry in self._registries for family in registry.collect()):
            if family.name in merged:
                merged[family.name].samples += family.samples
            else:
                merged[family.name] = family
        yield from merged.values()


class EngineCollector(Collector):
    """A collector that reads the engine's own counts, if it is loaded."""

    def __init__(self, stats: Callable[[], EngineStats | None], labels: list[str]) -> None:
        self._stats, self._labels = stats, labels

    def collect(self) -> Iterator[Any]:
        if (s := self._stats()) is None:
            return
        drafts = s.speculative_decoding
        cached = "Tokens of prompts whose cache rows were there already."
        gauges = {
            "num_requests_running": ("Requests in slots.", s.requests_running),
            "num_requests_waiting": ("Requests that wait for a slot.", s.requests_waiting),
            "kv_cache_usage_perc": ("Share of all cache rows that are in use.", s.cache_usage),
            "prefix_pool_bytes": ("Memory of rows of earlier prompts.", s.prefix_bytes),
            "prefix_pool_limit_bytes": ("Memory that these may have.", s.prefix_limit),
        }
        accepted = drafts.num_accepted_draft_tokens
        counters = {
            "prompt_tokens": ("Tokens of prompts.", s.prompt_tokens),
            "generation_tokens": ("Tokens that requests got.", s.output_tokens),
            "prompt_tokens_cached": (cached, s.prefix_hits),
            "prefix_cache_queries": ("Tokens of prompts that were looked up.", s.prefix_queries),
            "prefix_cache_hits": (cached, s.prefix_hits),
            "num_preemptions": ("Always 0: a request keeps its slot.", 0),
            "spec_decode_num_drafts": ("Times that a request's drafts were judged.", s.num_drafts),
            "spec_decode_num_draft_tokens": ("Tokens drafted.", drafts.num_draft_tokens),
            "spec_decode_num_accepted_tokens": ("Drafts accepted.", accepted),
        }
        for kind, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (about, value) in values.items():
                family = kind(f"vllm:{name}", about, labels=LABELS)
                family.add_metric(self._labels, value)
                yield family
        yield self._per_position(drafts.acceptance_histogram)
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
