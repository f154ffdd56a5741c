"""Runs of the engines in turn, group by group, with the time at which each step's tokens arrive."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

from mtpbuild.builder.bench.dataset import Group, Prompt
from mtpbuild.builder.garbage import no_garbage_collection
from mtpbuild.builder.plan import Nextn
from mtpbuild.runtime.contract.manifest import MAX_SEQ_LEN
from mtpbuild.runtime.engine import Engine
from mtpbuild.runtime.stats import SpeculativeDecoding

T = TypeVar("T")
WARM_UP_TOKENS = 32
# An engine's first steps after another engine take up to 1.7 times as long, as its weights have
# left the processor's caches. A user runs one engine, so these steps are not counted.
SETTLING_STEPS = 8
TIMED_STEPS = 16  # per context, of an engine and of its verifier
STEPS = SETTLING_STEPS + 1 + TIMED_STEPS
STRICT: dict[str, Any] = {  # disables every other acceptance of a request
    "acceptance": "strict",
    "rejection_sample_method": "standard",
    "synthetic_acceptance_rates": None,
    "synthetic_acceptance_length": None,
    "relaxed_topk": 1,
}


@dataclass(frozen=True, slots=True)
class Contender:
    """The engine of one nextn, and its verifier, which drafts nothing."""

    nextn: Nextn
    drafter: str | None
    engine: Engine
    verifier: Engine | None = None

    def asked(self, group: Group) -> Group:
        """Make nextn 0's requests strict: without drafts, other acceptance would only be slower."""
        return changed(group, **STRICT) if self.nextn == 0 else group


@dataclass(slots=True)
class Sample:
    """One engine's answer to one request; all times are seconds of one clock."""

    prompt: Prompt
    begun: float
    times: list[float] = field(default_factory=list)  # of each step's tokens
    token_ids: list[int] = field(default_factory=list)
    drafting: SpeculativeDecoding | None = None  # None if the run stopped early


@dataclass(slots=True)
class Measured:
    """The measurements of a contender."""

    groups: list[list[Sample]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)  # seconds, after the same contexts as `verify`
    verify: list[float] = field(default_factory=list)  # of the verifier's steps


def measure(
    contenders: Sequence[Contender],
    groups: Sequence[Group],
    watch: Callable[[int], None] = lambda done: None,
) -> dict[Nextn, Measured]:
    """Measure each nextn; the timed steps follow texts of the first contender, nextn 0."""
    measured = {contender.nextn: Measured() for contender in contenders}
    capacity = contenders[0].engine.manifest.build.max_seq_len
    most = capacity - STEPS * max(c.engine.manifest.window for c in contenders)
    warm_up(contenders, groups[0])
    with no_garbage_collection():
        for i, group in enumerate(groups):
            watch(i)
            for contender in rotated(contenders, i):
                asked = contender.asked(group)
                run_together(contender.engine, endless(asked), SETTLING_STEPS)
                measured[contender.nextn].groups.append(run_together(contender.engine, asked))
            baseline = measured[contenders[0].nextn].groups[-1]
            contexts = contexts_within(group, baseline, (i + 0.5) / len(groups), most)
            for contender in rotated(contenders, i):
                time_steps(contender, contender.asked(contexts), measured[contender.nextn])
    return measured


def run_together(engine: Engine, group: Group, most_steps: int | None = None) -> list[Sample]:
    """Run all prompts of a group concurrently; each ends by itself, or after `most_steps`."""
    with contextlib.ExitStack() as stack:
        samples = [Sample(prompt, time.perf_counter()) for prompt in group]
        streams = [stack.enter_context(engine.stream(p.token_ids, p.params)) for p in group]
        running = list(zip(samples, streams, strict=True))
        while running:  # the first stream that lacks a chunk runs a step for all
            for sample, stream in running:
                chunk = next(stream)
                sample.times.append(time.perf_counter())
                sample.token_ids += chunk.token_ids
                if chunk.metrics is not None:
                    sample.drafting = chunk.metrics.speculative_decoding
            running = [
                (sample, stream)
                for sample, stream in running
                if sample.drafting is None and len(sample.times) != most_steps
            ]
    return samples


def time_steps(contender: Contender, contexts: Group, measured: Measured) -> None:
    """Time a few steps of the engine, then of its verifier, after the same contexts."""
    pairs = ((contender.engine, measured.steps), (contender.verifier, measured.verify))
    for engine, seconds in pairs:
        if engine is not None:
            for sample in run_together(engine, endless(contexts), STEPS):
                seconds += intervals(sample)[SETTLING_STEPS:]


def intervals(sample: Sample) -> list[float]:
    """List the seconds of each step except the first, which includes the prompt."""
    return [later - earlier for earlier, later in pairwise(sample.times)]


def contexts_within(group: Group, baseline: Sequence[Sample], part: float, most: int) -> Group:
    """Extend each prompt by the first `part` of its answer, to `most` tokens at most."""
    return [
        replace(p, token_ids=(p.token_ids + said[: int(part * len(said))])[: max(most, 1)])
        for p, said in zip(group, (s.token_ids for s in baseline), strict=True)
    ]


def endless(group: Group, tokens: int = MAX_SEQ_LEN) -> Group:
    """Let prompts generate exactly `tokens` tokens, without stop tokens."""
    return changed(group, max_tokens=tokens, ignore_eos=True, stop=(), min_tokens=0)


def changed(group: Group, **changes: Any) -> Group:
    """Change some parameters of each prompt."""
    return [replace(p, params=replace(p.params, **changes)) for p in group]


def warm_up(contenders: Sequence[Contender], group: Group) -> None:
    """Run every engine once, so that memory is touched, kernels are chosen and clocks are up."""
    for contender in contenders:
        for engine in filter(None, (contender.engine, contender.verifier)):
            run_together(engine, endless(group, WARM_UP_TOKENS))


def rotated(contenders: Sequence[T], by: int) -> list[T]:
    """Rotate the order, so that each contender is first equally often."""
    by %= len(contenders)
    return [*contenders[by:], *contenders[:by]]
