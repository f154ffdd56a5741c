"""Totals of an engine's requests for its metrics: histograms of sizes and times."""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple, Protocol

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
TOKENS: Sequence[float] = ()  # stands for 1, 2, 5, 10, .. up to the engine's max_seq_len
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {  # name: help and bounds
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
CACHED = "Tokens of prompts whose cache rows were there already."
DRAFTS = "speculative_decoding.num"
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "generation_tokens": ("output_tokens", "Tokens that requests got."),
    "prompt_tokens_cached": ("prefix_hits", CACHED),
    "prefix_cache_queries": ("prefix_queries", "Tokens of prompts that were looked up."),
    "prefix_cache_hits": ("prefix_hits", CACHED),
    "spec_decode_num_drafts": ("num_drafts", "Times that a request's drafts were judged."),
    "spec_decode_num_draft_tokens": (f"{DRAFTS}_draft_tokens", "Tokens drafted."),
    "spec_decode_num_accepted_tokens": (f"{DRAFTS}_accepted_draft_tokens", "Drafts accepted."),
}
STEP, POSITION = "step", "position"  # kinds of counters: by a step's tokens, by a draft's place


class Histogram:
    """The number of values up to each bound, and their sum; Prometheus' histograms."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.sum = bounds, 0.0
        self._counts = [0] * (len(bounds) + 1)  # the last: values above all bounds

    def add(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def cumulative(self) -> list[int]:
        """The number of values up to each bound, and of all values."""
        return list(accumulate(self._counts))


class Counted(Protocol):
    """An engine whose counters are part of the totals."""

    @property
    def stats(self) -> EngineStats: ...


class RequestTotals:
    """The histograms of all requests of an engine, and how many ended for which reason."""

    def __init__(self, max_seq_len: int) -> None:
        sizes = [factor * 10**power for power in range(9) for factor in (1, 2, 5)]
        sizes = [size for size in sizes if size <= max_seq_len]
        self.histograms = {n: Histogram(bounds or sizes) for n, (_, bounds) in HISTOGRAMS.items()}
        self.ended: Counter[str] = Counter()  # by finish reason
        self.past: Counter[tuple[str, int]] = Counter()  # of engines that were given back
        self.replaced: list[Counted] = []  # engines that were swapped and still have requests
        self.lock = threading.Lock()  # taken to replace an engine, and to count

    def add(self, name: str, value: float) -> None:
        """Add a value to one of HISTOGRAMS."""
        self.histograms[name].add(value)

    def add_request(self, metrics: RequestMetrics, max_tokens: int, seconds: float) -> None:
        """Add the sizes and times of a request that ended after so many seconds."""
        self.add("request_params_max_tokens", max_tokens)
        self.add("request_prompt_tokens", metrics.prompt_tokens)
        self.add("request_generation_tokens", metrics.output_tokens)
        self.add("e2e_request_latency_seconds", seconds)
        if metrics.queue_s is None or metrics.ttft_s is None:
            return
        prefill = metrics.ttft_s - metrics.queue_s
        decode = (metrics.tpot_s or 0) * (metrics.output_tokens - 1)
        self.add("request_queue_time_seconds", metrics.queue_s)
        self.add("request_prefill_time_seconds", prefill)
        self.add("request_decode_time_seconds", decode)
        self.add("request_inference_time_seconds", prefill + decode)
        if metrics.tpot_s is not None:
            self.add("request_time_per_output_token_seconds", metrics.tpot_s)

    def count_all(self, stats: EngineStats) -> Counter[tuple[str, int]]:
        """Return the counters of an engine and of those whose place it took; within the lock."""
        counts = self.past.copy()
        for engine_stats in (stats, *(engine.stats for engine in self.replaced)):
            counts.update(count_stats(engine_stats))
        return counts

    def retire(self, engine: Counted) -> None:
        """Add the counters of an engine that has no more requests to `past`."""
        with self.lock:
            self.past.update(count_stats(engine.stats))
            self.replaced = [other for other in self.replaced if other is not engine]


def count_stats(stats: EngineStats) -> Counter[tuple[str, int]]:
    """Return an engine's counters, which can be added to another engine's."""
    accepted = stats.speculative_decoding.acceptance_histogram
    counts = {(field, 0): attrgetter(field)(stats) for field, _ in COUNTERS.values()}
    counts |= {(POSITION, i): sum(accepted[i + 1 :]) for i in range(len(accepted) - 1)}
    return Counter(counts | {(STEP, n): count for n, count in stats.step_tokens.items()})


class MeteredModel(NamedTuple):
    """A model's name to clients, and the counts of its engines and requests.

    stats: None if its engine was given back.
    """

    name: str
    build: BuildInfo
    stats: EngineStats | None
    counts: Counter[tuple[str, int]]
    totals: RequestTotals

    @property
    def labels(self) -> list[str]:
        return [self.name, "0"]
