"""Makes the text of `/metrics`, under vLLM's names, so that dashboards for vLLM work."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from mtpbuild.runtime.stats import EngineStats

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
LABELS = ("model_name", "engine")


class Metrics:
    """Counts requests and their times; the engine's own counts are read on demand."""

    def __init__(self, model: str, max_model_len: int, stats: Callable[[], EngineStats]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self._registry.register(EngineCollector(stats, [model, "0"]))
        sizes = _sizes(max_model_len)
        self.first_token = self._histogram("time_to_first_token_seconds", FIRST)
        self.between = self._histogram("inter_token_latency_seconds", BETWEEN)
        self.per_token = self._histogram("request_time_per_output_token_seconds", BETWEEN)
        self.whole = self._histogram("e2e_request_latency_seconds", WHOLE)
        self.queued = self._histogram("request_queue_time_seconds", WHOLE)
        self.prefill = self._histogram("request_prefill_time_seconds", WHOLE)
        self.decode = self._histogram("request_decode_time_seconds", WHOLE)
        self.inference = self._histogram("request_inference_time_seconds", WHOLE)
        self.prompt = self._histogram("request_prompt_tokens", sizes)
        self.generated = self._histogram("request_generation_tokens", sizes)
        self._ended = Counter(
            "vllm:request_success",
            "Requests that ended, by finish reason.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )

    def ended(self, reason: str) -> None:
        self._ended.labels(**self._labels, finished_reason=reason).inc()

    def text(self) -> tuple[bytes, str]:
        """Give the exposition and its media type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        about = name.replace("_", " ")
        made = Histogram(f"vllm:{name}", about, LABELS, registry=self._registry, buckets=buckets)
        return made.labels(**self._labels)


class EngineCollector(Collector):
    """Reads the engine's own counts."""

    def __init__(self, stats: Callable[[], EngineStats], labels: list[str]) -> None:
        self._stats, self._labels = stats, labels

    def collect(self) -> Iterator[Any]:
        s = self._stats()
        drafting = s.speculative_decoding
        gauges = {
            "num_requests_running": s.requests_running,
            "num_requests_waiting": s.requests_waiting,
            "kv_cache_usage_perc": s.cache_usage,
        }
        counters = {
            "prompt_tokens": s.prompt_tokens,
            "generation_tokens": s.output_tokens,
            "prompt_tokens_cached": s.prefix_hits,
            "prefix_cache_queries": s.prefix_queries,
            "prefix_cache_hits": s.prefix_hits,
            "num_preemptions": 0,
            "spec_decode_num_drafts": s.num_drafts,
            "spec_decode_num_draft_tokens": drafting.num_draft_tokens,
            "spec_decode_num_accepted_tokens": drafting.num_accepted_draft_tokens,
        }
        for kind, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, value in values.items():
                family = kind(f"vllm:{name}", name.replace("_", " "), labels=LABELS)
                family.add_metric(self._labels, value)
                yield family
        yield self._per_position(drafting.acceptance_histogram)

    def _per_position(self, histogram: Sequence[int]) -> CounterMetricFamily:
        name = "spec_decode_num_accepted_tokens_per_pos"
        labels = (*LABELS, "position")
        family = CounterMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=labels)
        for position in range(len(histogram) - 1):
            family.add_metric([*self._labels, str(position)], sum(histogram[position + 1 :]))
        return family


def _sizes(most: int) -> list[float]:
    """List 1, 2, 5, 10, .. up to `most`."""
    sizes = (factor * 10**power for power in range(9) for factor in (1, 2, 5))
    return [float(size) for size in sizes if size <= most]
