"""Statistics: accepted drafts per position, latencies, and tokens per second.

Names and formulas are vLLM's. A *step* is a decode step, including the first one (which has no
drafts to verify) and those of an engine without drafts, so complete steps give `num_spec_steps +
num_accepted_draft_tokens` tokens. Drafts are counted for whole steps, even if a request keeps only
a part of its last step; `compute_acceptance_length` counts the tokens that were kept.
"""

import logging
from dataclasses import dataclass, field

# Steps with drafts, and their drafts, after which acceptance is judged: by the first draft of each
# step, as later ones depend on it. With more than four drafts a step, 200 would be few steps.
WATCHED_STEPS, WATCHED_DRAFTS = 50, 200
SELDOM = 0.1  # share of accepted first drafts below which there is a warning

REJECTED = (
    "drafts are seldom accepted: %d of %d first drafts. The output is still right, but drafts only "
    "cost time. Likely reasons: a head of another model or fine-tune; one that was quantised too "
    "coarsely, or is read one position off; a repetition penalty; a wrong chat template. "
    "`mtpbuild report` compares the head with the plain model's (docs/report.md)"
)

log = logging.getLogger("mtpbuild")


@dataclass(frozen=True, slots=True)
class SpeculativeDecoding:
    """The acceptance of drafts over some decode steps."""

    mean_acceptance_length: float | None  # tokens kept / steps; None before the first step
    draft_acceptance_rate: float | None  # accepted / drafted; None when nothing was drafted
    per_position_acceptance_rates: list[float]  # [nextn] accepted at position i / all steps
    acceptance_histogram: list[int]  # [nextn + 1] entry j: steps that accepted exactly j drafts
    num_spec_steps: int  # decode steps
    num_accepted_draft_tokens: int  # by all steps
    num_draft_tokens: int  # of all steps
    num_spec_tokens: int  # nextn: the largest number of drafts of a step


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The metrics of a request. Times begin at its submission, before it waits for a slot."""

    prompt_tokens: int  # cached ones, too
    output_tokens: int  # with the token that ended it
    ttft_s: float | None  # time to first token; None if there was none
    tpot_s: float | None  # time per output token after the first; None for fewer than two tokens
    tokens_per_s: float  # output tokens / seconds since the request got its slot, prefill included
    speculative_decoding: SpeculativeDecoding  # the acceptance of its drafts
    cached_tokens: int = 0  # of the prompt; their rows were reused from an earlier prompt
    queue_s: float | None = None  # until it got a slot; None if it never got a slot
    # Accepted drafts that a grammar forced, in place of the MTP modules' drafts.
    forced_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The totals of all requests since the engine was loaded."""

    requests_running: int  # in slots
    requests_waiting: int  # for a slot
    requests_ended: int  # after they got a slot
    prompt_tokens: int  # of the admitted requests
    output_tokens: int  # that requests received
    speculative_decoding: SpeculativeDecoding  # the acceptance of all drafts
    prefix_queries: int = 0  # tokens of prompts that were looked up in the prefix cache
    prefix_hits: int = 0  # how many of these tokens were found
    prefix_bytes: int = 0  # memory of the prefix cache's entries, outside the slots
    prefix_limit: int = 0  # limit of that memory
    num_drafts: int = 0  # steps of single requests that verified at least one draft
    cache_usage: float = 0.0  # the share of all slots' cache rows that requests use
    # Number of tokens filled in and emitted by a step -> number of such steps.
    step_tokens: dict[int, int] = field(default_factory=dict)


def compute_acceptance_length(tokens: int, steps: int) -> float | None:
    """Return how many tokens a step gives on average; None before the first step.

    tokens: those that requests kept. The end of a request cuts its last step.
    """
    return tokens / steps if steps else None


class AcceptanceCounter:
    """A histogram of steps by accepted drafts, the drafted tokens, and the steps with drafts."""

    __slots__ = ("drafted", "drafts", "histogram", "tokens")

    def __init__(self, nextn: int) -> None:
        self.histogram = [0] * (nextn + 1)
        self.drafted = self.drafts = self.tokens = 0

    def add(self, accepted: int, drafted: int, kept: int | None = None) -> None:
        """Count a decode step that accepted `accepted` of a request's drafts.

        kept: how many of the step's tokens the request kept, if it ended within them.
        """
        self.tokens += accepted + 1 if kept is None else kept
        self.histogram[accepted] += 1
        self.drafted += drafted
        self.drafts += drafted > 0

    @property
    def steps(self) -> int:
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        return sum(j * steps for j, steps in enumerate(self.histogram))

    def report(self) -> SpeculativeDecoding:
        steps, accepted, nextn = self.steps, self.accepted, len(self.histogram) - 1
        reached = [sum(self.histogram[i + 1 :]) for i in range(nextn)]
        return SpeculativeDecoding(
            mean_acceptance_length=compute_acceptance_length(self.tokens, steps),
            draft_acceptance_rate=accepted / self.drafted if self.drafted else None,
            per_position_acceptance_rates=[n / steps if steps else 0.0 for n in reached],
            acceptance_histogram=list(self.histogram),
            num_spec_steps=steps,
            num_accepted_draft_tokens=accepted,
            num_draft_tokens=self.drafted,
            num_spec_tokens=nextn,
        )


class AcceptanceWatch:
    """A watch that warns once if drafts are seldom accepted; the text would not show it."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._accepted = self._steps = self._drafts = 0

    def add(self, accepted: int, drafted: int) -> None:
        """Count a decode step; judge the acceptance after enough drafts, then count anew."""
        if self._quiet or drafted == 0:
            return
        self._accepted += accepted > 0
        self._steps += 1
        self._drafts += drafted
        if self._steps >= WATCHED_STEPS and self._drafts >= WATCHED_DRAFTS:
            if self._accepted < SELDOM * self._steps:
                self._quiet = True
                log.warning(REJECTED, self._accepted, self._steps)
            self._accepted = self._steps = self._drafts = 0
