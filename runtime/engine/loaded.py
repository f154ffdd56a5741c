"""What an engine directory becomes when it is loaded, and the parts of loading it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np

from mtpbuild.runtime.checks import format_value
from mtpbuild.runtime.constraints.grammar import Grammars
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import Adaptive, Programs, Shared
from mtpbuild.runtime.engine.driver import Driver
from mtpbuild.runtime.engine.loop import Loop
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.requests.stats import EngineStats
from mtpbuild.runtime.requests.step_controls import make_step_controls
from mtpbuild.runtime.sampling.params import SamplingParams
from mtpbuild.runtime.text.chat_template import Message
from mtpbuild.runtime.text.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int]  # text, or token ids that are used unchanged
Chat: TypeAlias = Sequence[Message] | Prompt  # a conversation, or its prompt

WARM_UP = 8  # tokens of the prompt that is filled in before the first request


@dataclass(eq=False, kw_only=True)
class LoadedEngine:
    """The loaded parts of an engine directory; `Engine.swap` replaces it by another one."""

    manifest: Manifest
    tokenizer: Tokenizer | None
    loop: Loop
    folder: Path | None = None  # that it was loaded from
    grammars: Grammars = field(init=False)
    driver: Driver = field(init=False)

    def __post_init__(self) -> None:
        self.grammars = Grammars(self.manifest, self.tokenizer, self.loop.programs.features)
        self.driver = Driver(self.loop)

    @property
    def stats(self) -> EngineStats:
        """The totals of all requests so far."""
        admitted, build = self.loop.scheduler.admitted, self.manifest.build
        running = sum(not request.cancelled for request in admitted)
        acceptance, prefixes = self.loop.acceptance, self.loop.prefix_cache
        rows = build.slots * build.max_seq_len
        return EngineStats(
            requests_running=running,
            requests_waiting=len(self.loop.scheduler.waiting),
            requests_ended=self.loop.num_requests - running,
            prompt_tokens=self.loop.prompt_tokens,
            output_tokens=acceptance.tokens,
            speculative_decoding=acceptance.report(),
            prefix_queries=prefixes.queries if prefixes else 0,
            prefix_hits=prefixes.hits if prefixes else 0,
            prefix_bytes=prefixes.tree.used if prefixes else 0,
            prefix_limit=prefixes.tree.limit if prefixes else 0,
            num_drafts=acceptance.drafts,
            cache_usage=sum(request.length for request in admitted) / rows,
            step_tokens=dict(self.loop.step_tokens),
        )

    @property
    def failure(self) -> str | None:
        """The reason why the engine cannot continue; None as long as none is known."""
        if (reason := self.driver.failure) or self.driver.closed:
            return reason
        programs = self.loop.programs
        return cast(Shared, programs).failure if Feature.SHARE in programs.features else None


def warm_up(programs: Programs, manifest: Manifest, settings: Iterable[SamplingParams]) -> None:
    """Fill in a short prompt and run a step, once for each of these settings.

    An adaptive engine runs a step with each nextn, which is a program of its own; its step with one
    draft first fills in what the step without drafts left out. The slot stays free.
    """
    build = manifest.build
    length = min(WARM_UP, build.prefill_chunk, build.max_seq_len - 1)
    active = np.arange(build.slots) == 0
    for params in settings:
        programs.prefill(0, 0, np.zeros(length + programs.lookahead, np.int64))
        for nextn in range(build.nextn + 1) if build.adaptive else (None,):
            if nextn is not None:
                cast(Adaptive, programs).draft(nextn)
            if nextn != 1:
                programs.begin(0, length, 0, make_step_controls([0], params, manifest))
            programs.step(active, length + 1 + manifest.window)


def limit_context(manifest: Manifest, max_seq_len: int | None) -> Manifest:
    """Return the manifest with another limit of a request's tokens; None keeps the limit."""
    if max_seq_len is None:
        return manifest
    smallest, largest = manifest.window + 3, manifest.build.max_seq_len
    if not smallest <= max_seq_len <= largest:
        raise UsageError(
            f"max_seq_len must be from {smallest} to {largest}, for which this engine was built, "
            f"not {format_value(max_seq_len)}"
        )
    build = manifest.build.model_copy(update={"max_seq_len": max_seq_len})
    return manifest.model_copy(update={"build": build})
