"""A request: its tokens so far, its text, and its end."""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mtpbuild.runtime.constraints.grammar import Grammar
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import StepOutput
from mtpbuild.runtime.errors import (
    DeadlineError,
    EngineError,
    MtpbuildError,
    RankError,
    RequestError,
    RequestFailedError,
    StepError,
    take_first_line,
)
from mtpbuild.runtime.requests.stats import AcceptanceCounter, RequestMetrics
from mtpbuild.runtime.requests.step_controls import find_acceptance_rates, make_step_controls
from mtpbuild.runtime.requests.totals import RequestTotals
from mtpbuild.runtime.sampling.params import SamplingParams
from mtpbuild.runtime.text.detokenizer import Span, TextStream, Thought
from mtpbuild.runtime.text.reasoning import opens_thought
from mtpbuild.runtime.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "cancelled", "tool_calls"]  # the last: of chats
log = logging.getLogger("mtpbuild")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities at one position, under the plain softmax of the logits."""

    token_id: int  # the token at this position
    logprob: float  # its own
    top: tuple[tuple[int, float], ...]  # the N most probable tokens in descending order
    rank: int = 0  # for a prompt's token; 1: the most probable one


@dataclass(frozen=True, slots=True)
class Chunk:
    """The output of one decode step; the text of a token may come with a later chunk."""

    spans: tuple[Span, ...]  # the new text in pieces, each with the origin of its token
    token_ids: tuple[int, ...]  # the new tokens
    from_draft: tuple[bool, ...]  # per token: an accepted draft (True) or the model's own (False)
    finish_reason: FinishReason | None = None  # like the next two, set in the last chunk alone
    stop_reason: str | int | None = None  # the stop string or stop token that ended the request
    metrics: RequestMetrics | None = None  # of the whole request
    logprobs: tuple[TokenLogprobs, ...] | None = None  # per token, if requested
    # In the first chunk, if requested: for the prompt's tokens after its first one.
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    # Per token: the number of characters that the request's earlier tokens have added, including
    # a stop string that is cut off the text.
    starts: tuple[int, ...] = ()
    reasoning_tokens: int = 0  # of all tokens so far, if thoughts are split off

    @property
    def text(self) -> str:
        """The new text, with the marks of thoughts that are shown."""
        return "".join(span.text for span in self.spans)


@dataclass(frozen=True, slots=True)
class Result:
    """The text, tokens and metrics of a request."""

    text: str  # without a stop string and special tokens
    token_ids: list[int]  # with the token that ended it
    from_draft: list[bool] = field(repr=False)  # per token: an accepted draft
    finish_reason: FinishReason  # "tool_calls": a chat that stopped after calls of tools
    metrics: RequestMetrics = field(repr=False)  # its sizes, times and acceptance
    seed: int | None  # that sampling used; None: greedy, and none was given
    logprobs: list[TokenLogprobs] | None = field(default=None, repr=False)  # if requested
    # If requested: of the prompt's tokens after its first one.
    prompt_logprobs: list[TokenLogprobs] | None = field(default=None, repr=False)
    # Not empty: drafts were accepted by chance, at these rates, and the text is meaningless.
    synthetic_acceptance_rates: tuple[float, ...] = ()
    stop_reason: str | int | None = None  # the stop string or stop token that ended it


class Observer(Protocol):
    """An observer of one or more requests' steps; the thread that steps the loop calls it."""

    def step(self, request: "Request", output: StepOutput, slot: int) -> None:
        """Observe a step before the request takes its tokens; the next step reuses the arrays."""

    def end(self, request: "Request", reason: FinishReason) -> None:
        """Observe that the request has all its tokens; not called for a failed request."""


def wrap_error(error: BaseException) -> RequestFailedError:
    """Return the request's error for an exception of the host's code; log an unexpected one."""
    if not isinstance(error, MtpbuildError):
        log.error("a request failed in the host's own code", exc_info=error)
    failure = RequestFailedError(f"the request failed: {take_first_line(error)}")
    failure.__cause__ = error
    return failure


class Request:
    """A request from its submission to its end; only the thread that steps the loop changes it.

    outbox: chunks that the caller has not taken. listener: called after each new chunk.
    """

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        manifest: Manifest,
        tokenizer: Tokenizer | None,
        observer: Observer | None = None,
    ) -> None:
        self.prompt, self.params, self.observer = prompt, params, observer
        self.listener: Callable[[], None] = lambda: None
        self.token_ids: list[int] = []
        self.from_draft: list[bool] = []
        self.finish_reason: FinishReason | None = None
        self.error: MtpbuildError | None = None
        self.grammar: Grammar | None = None  # the grammar that its tokens must follow
        self.forced = 0  # accepted drafts that a grammar forced
        self.cancelled = False  # the loop ends a cancelled request before its next step
        self.owner: Any = None  # the driver of the engine that prepared it
        self.totals: RequestTotals | None = None  # counts it, too
        self.outbox: deque[Chunk] = deque()
        self.acceptance = AcceptanceCounter(manifest.build.nextn)
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.controls = make_step_controls(prompt, params, manifest, tokenizer)
        self.synthetic = find_acceptance_rates(params, manifest.build.nextn)
        self.seed = self.controls.seed if params.temperature > 0 else params.seed
        self._limit = min(params.max_tokens, manifest.build.max_seq_len - len(prompt))
        self._end_ids = params.end_ids(manifest.model.eos_token_ids)
        marks = manifest.model.thinking_token_ids if params.split_thought else None
        self._thought = Thought(marks, opens_thought(prompt, marks, tokenizer)) if marks else None
        self._starts: list[int] = []
        self._text = TextStream(
            tokenizer,
            params.stop,
            params.shown_tokens,
            with_stop=params.include_stop_str_in_output,
            thought=self._thought,
            stop_in_thought=params.stop_in_thought,
        )
        self._pieces: list[str] = []
        self.cached_tokens = 0  # tokens of the prompt whose cache rows were reused
        self._submitted = time.perf_counter()
        self.deadline = None if params.timeout is None else self._submitted + params.timeout
        self.started: float | None = None  # the time at which it got a slot
        self._first = self._last = 0.0

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def length(self) -> int:
        """The number of committed cache rows: one for each known token except the newest."""
        return len(self.prompt) + len(self.token_ids) - 1

    def start(self) -> None:
        """Record the time at which the request got a slot."""
        self.started = time.perf_counter()

    def receive(
        self,
        tokens: list[int],
        drafted: int,
        logprobs: Sequence[TokenLogprobs] = (),
        totals: AcceptanceCounter | None = None,
    ) -> int:
        """Take the tokens [n] of a step: n - 1 accepted drafts of `drafted`, then the model's own.

        If the request ends at a token, those after it are dropped. logprobs: an entry per token, if
        the request asks for them. totals: counts the steps of all requests. Returns the number of
        tokens that the request has kept.
        """
        assert tokens, "a step of an active slot emits at least one token"
        accepted, published = len(tokens) - 1, len(self.token_ids)
        before, self._last = self._last, time.perf_counter()
        self._first = self._first or self._last
        if self.totals is not None:
            name = "inter_token_latency_seconds" if before else "time_to_first_token_seconds"
            self.totals.add(name, self._last - (before or self._submitted))
        reason: FinishReason | None = None
        for i, token in enumerate(tokens):
            self.token_ids.append(token)
            self.from_draft.append(i < accepted)
            self.forced += self.grammar is not None and self.grammar.kept <= i < accepted
            reason = self._append_text(token, i < accepted)
            if reason:
                break
            if self.grammar and not self._advance_grammar(token):
                return 0
        kept = len(self.token_ids) - published
        for counts in (self.acceptance, *([totals] if totals else [])):
            counts.add(accepted, drafted, kept)
        self.logprobs += logprobs[:kept]
        self._publish(published, reason)  # last: a listener may read the counts at once
        return kept

    def end(self, reason: FinishReason) -> None:
        """End the request with the tokens that it has."""
        self._publish(len(self.token_ids), reason)

    def fail(self, error: MtpbuildError) -> None:
        """End the request with an error, and wake the thread that waits for it."""
        self.error = error
        if self.totals is not None:
            self.totals.ended["abort" if isinstance(error, DeadlineError) else "error"] += 1
        with contextlib.suppress(Exception):  # the waiter is gone
            self.listener()

    @contextlib.contextmanager
    def contain(self) -> Iterator[None]:
        """Fail this request alone if the block raises; a request that has ended keeps its result.

        Exceptions that end all requests pass: a program's own failure, a lost rank, Ctrl-C.
        """
        try:
            yield
        except (StepError, RankError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # includes panics of Rust code, which are no Exception
            known = error if isinstance(error, RequestError | EngineError) else None
            failure = known or wrap_error(error)
            if self.finish_reason is None:
                self.fail(failure)

    def result(self) -> Result:
        """Return the result of a request that has ended; raise the error that ended it."""
        if self.error:
            raise self.error
        assert self.finish_reason
        return Result(
            "".join(self._pieces),
            self.token_ids,
            self.from_draft,
            self.finish_reason,
            self.metrics(),
            self.seed,
            None if self.params.logprobs is None else self.logprobs,
            None if self.params.prompt_logprobs is None else self.prompt_logprobs,
            self.synthetic,
            self._stop_reason() if self.finish_reason == "stop" else None,
        )

    def metrics(self) -> RequestMetrics:
        n = len(self.token_ids)
        return RequestMetrics(
            prompt_tokens=len(self.prompt),
            output_tokens=n,
            ttft_s=self._first - self._submitted if n else None,
            tpot_s=(self._last - self._first) / (n - 1) if n > 1 else None,
            tokens_per_s=n / (self._last - (self.started or 0)) if n else 0.0,
            speculative_decoding=self.acceptance.report(),
            cached_tokens=self.cached_tokens,
            queue_s=None if self.started is None else self.started - self._submitted,
            forced_tokens=self.forced,
        )

    def _advance_grammar(self, token: int) -> bool:
        """Advance the grammar by a token; return False if it fails, which fails the request."""
        assert self.grammar is not None
        try:
            self.grammar.take(token)
        except RequestError as error:
            self.fail(error)
        return self.error is None

    def _append_text(self, token: int, from_draft: bool) -> FinishReason | None:
        """Append the newest token's text; return the finish reason if the request ends with it."""
        count = len(self.token_ids)
        self._starts.append(self._text.length)
        may_stop = count >= self.params.min_tokens
        ends = may_stop and token in self._end_ids
        if not ends and self._text.push(token, from_draft, may_stop=may_stop):
            return "stop"
        full = count >= self._limit
        if (ends or full) and self._text.cut_at_stop():
            return "stop"
        return "stop" if ends else "length" if full else None

    def _count_reasoning_tokens(self) -> int:
        """Return the number of thought tokens: all, if the thought has not ended."""
        if self._thought is None:
            return 0
        return len(self.token_ids) if self._thought.thinking else self._thought.tokens

    def _stop_reason(self) -> str | int | None:
        newest = self.token_ids[-1]
        return self._text.stopped_by or (newest if newest in self.params.stop_token_ids else None)

    def _publish(self, published: int, reason: FinishReason | None) -> None:
        """Add a chunk with the tokens after the first `published` and the text that is final."""
        spans = self._text.take(everything=reason is not None)
        self._pieces += [span.text for span in spans]
        metrics = self.metrics() if reason else None
        if self.observer and reason:
            self.observer.end(self, reason)
        self.outbox.append(
            Chunk(
                spans,
                tuple(self.token_ids[published:]),
                tuple(self.from_draft[published:]),
                reason,
                self._stop_reason() if reason == "stop" else None,
                metrics,
                None if self.params.logprobs is None else tuple(self.logprobs[published:]),
                tuple(self.prompt_logprobs) if not published and self.prompt_logprobs else None,
                tuple(self._starts[published:]),
                self._count_reasoning_tokens(),
            )
        )
        if self.totals is not None and metrics is not None:
            seconds = time.perf_counter() - self._submitted
            self.totals.ended["abort" if reason == "cancelled" else str(reason)] += 1
            self.totals.add_request(metrics, self.params.max_tokens, seconds)
        self.finish_reason = reason  # last: other threads read it without a lock
        self.listener()
