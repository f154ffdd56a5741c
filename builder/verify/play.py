"""Runs of requests that record each token's log-probability and margin."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.programs import StepOutput
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.request import FinishReason, Request
from mtpbuild.runtime.stats import SpeculativeDecoding


def load_again(
    folder: Path, engine: Engine, chunk: int | None, threads: int | None, **options: Any
) -> Engine:
    """Load an engine again, with another prefill chunk or number of threads."""
    size = chunk or engine.manifest.build.prefill_chunk
    build = engine.manifest.build.model_copy(update={"prefill_chunk": size})
    manifest = engine.manifest.model_copy(update={"build": build})
    programs = load_programs(folder, manifest, threads=threads, **options)
    return Engine(programs, manifest, engine.tokenizer)


@dataclass(frozen=True, slots=True)
class Played:
    """A request's tokens, with a log-probability and a margin for each."""

    token_ids: list[int]
    logprobs: list[float]  # under the plain softmax
    margins: list[float]  # of logits if greedy, else of the random number to the border of its cell
    drafting: SpeculativeDecoding


@dataclass(slots=True)
class Recorder:
    """An observer that records the log-probabilities and margins of one request."""

    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)

    def step(self, request: Request, output: StepOutput, slot: int) -> None:
        emitted = int(output.num_tokens[slot])
        self.logprobs += output.logprobs[slot, :emitted].tolist()
        self.margins += output.margins[slot, :emitted].tolist()

    def end(self, request: Request, reason: FinishReason) -> None:
        pass


def play(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    *,
    together: bool = False,
) -> list[Played]:
    """Run each prompt with its parameters, one after the other or all at once."""
    if not together:
        pairs = zip(prompts, params, strict=True)
        return [play(engine, [p], [own], together=True)[0] for p, own in pairs]
    recorders = [Recorder() for _ in prompts]
    with contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(engine.stream(prompt, own, observer=recorder))
            for prompt, own, recorder in zip(prompts, params, recorders, strict=True)
        ]
        results = [stream.result() for stream in streams]
    return [
        Played(
            list(result.token_ids),
            recorder.logprobs[: len(result.token_ids)],
            recorder.margins[: len(result.token_ids)],
            result.metrics.speculative_decoding,
        )
        for result, recorder in zip(results, recorders, strict=True)
    ]
