"""Runs of requests on an engine, with the time at which each step's tokens arrive."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from mtpbuild.lab.measure.prompts import Group, Prompt
from mtpbuild.runtime.contract.manifest import MAX_SEQ_LEN
from mtpbuild.runtime.contract.programs import StepOutput
from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.requests.request import FinishReason, Request
from mtpbuild.runtime.requests.stats import SpeculativeDecoding
from mtpbuild.runtime.sampling.params import SamplingParams

T = TypeVar("T")
# An engine's first steps after another engine take up to 1.7 times as long, as its weights have
# left the processor's caches. A user runs one engine, so these steps are not counted.
SETTLING_STEPS = 8
STRICT: dict[str, Any] = {  # disables every other acceptance of a request
    "acceptance": "strict",
    "acceptance_settings": None,
    "rejection_sample_method": "standard",
    "synthetic_acceptance_rates": None,
    "synthetic_acceptance_length": None,
    "relaxed_topk": 1,
}


@dataclass(slots=True)
class TimedAnswer:
    """One engine's answer to one request; all times are seconds of one clock."""

    prompt: Prompt
    submitted: float = 0.0
    times: list[float] = field(default_factory=list)  # of each step's tokens
    token_ids: list[int] = field(default_factory=list)
    statistics: SpeculativeDecoding | None = None  # None if the run stopped early
    # If `run_group` records them, of each token: its log-probability under the plain softmax; its
    # margin, between the best two logits if greedy, else of the random number to its cell's border.
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)

    @property
    def drafting(self) -> SpeculativeDecoding:
        assert self.statistics is not None, "the request has ended"
        return self.statistics

    @property
    def intervals(self) -> list[float]:
        """The seconds of each step except the first, which includes the prompt."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    def step(self, request: Request, output: StepOutput, slot: int) -> None:
        """Record a step's log-probabilities and margins, as the request's observer."""
        emitted = int(output.num_tokens[slot])
        self.logprobs += output.logprobs[slot, :emitted].tolist()
        self.margins += output.margins[slot, :emitted].tolist()

    def end(self, request: Request, reason: FinishReason) -> None:
        kept = len(request.token_ids)
        self.logprobs, self.margins = self.logprobs[:kept], self.margins[:kept]


def run_group(
    engine: Engine, group: Group, most_steps: int | None = None, *, record: bool = False
) -> list[TimedAnswer]:
    """Run all prompts of a group concurrently; each ends by itself, or after `most_steps`.

    record: whether the answers get their tokens' log-probabilities and margins.
    """
    with contextlib.ExitStack() as stack:
        answers = [TimedAnswer(prompt, time.perf_counter()) for prompt in group]
        running = []
        for p, answer in zip(group, answers, strict=True):
            stream = engine.stream(p.token_ids, p.params, observer=answer if record else None)
            running.append((answer, stack.enter_context(stream)))
        while running:  # the first stream that lacks a chunk runs a step for all
            for answer, stream in running:
                chunk = next(stream)
                answer.times.append(time.perf_counter())
                answer.token_ids += chunk.token_ids
                if chunk.metrics is not None:
                    answer.statistics = chunk.metrics.speculative_decoding
            running = [
                (answer, stream)
                for answer, stream in running
                if answer.statistics is None and len(answer.times) != most_steps
            ]
    return answers


def run_prompts(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    *,
    together: bool = False,
) -> list[TimedAnswer]:
    """Run prompts one after the other, or all at once, and record log-probabilities and margins."""
    group = [Prompt("", i, *pair) for i, pair in enumerate(zip(prompts, params, strict=True))]
    groups = [group] if together else [[prompt] for prompt in group]
    return [answer for group in groups for answer in run_group(engine, group, record=True)]


def run_settled(engine: Engine, group: Group) -> list[TimedAnswer]:
    """Run a group, after a few steps of it that are not counted."""
    run_group(engine, make_endless(group), SETTLING_STEPS)
    return run_group(engine, group)


def reload_engine(folder: Path, engine: Engine, chunk: int | None = None, **options: Any) -> Engine:
    """Load an engine again, with another prefill chunk or other options, such as `threads`."""
    size = chunk or engine.manifest.build.prefill_chunk
    build = engine.manifest.build.model_copy(update={"prefill_chunk": size})
    manifest = engine.manifest.model_copy(update={"build": build})
    return Engine(load_programs(folder, manifest, **options), manifest, engine.tokenizer)


def make_endless(group: Group, tokens: int = MAX_SEQ_LEN) -> Group:
    """Let prompts generate exactly `tokens` tokens, without stop tokens."""
    return change_params(group, max_tokens=tokens, ignore_eos=True, stop=(), min_tokens=0)


def change_params(group: Group, **changes: Any) -> Group:
    """Change some parameters of each prompt."""
    return [replace(p, params=replace(p.params, **changes)) for p in group]


def rotate(contenders: Sequence[T], by: int) -> list[T]:
    """Rotate the order, so that each contender is first equally often."""
    by %= len(contenders)
    return [*contenders[by:], *contenders[:by]]
