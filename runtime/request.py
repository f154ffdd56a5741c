"""A request in flight: its tokens so far, its text, and when it ends."""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, Protocol, Self

from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import StepOutput
from mtpbuild.runtime.controls_of import controls_of, end_ids, rates_of
from mtpbuild.runtime.errors import (
    MtpbuildError,
    RankError,
    RequestError,
    RequestFailedError,
    StepError,
)
from mtpbuild.runtime.grammar import Grammar
from mtpbuild.runtime.reasoning import Piece
from mtpbuild.runtime.sampling import SamplingParams
from mtpbuild.runtime.stats import Acceptance, RequestMetrics
from mtpbuild.runtime.text import Span, TextStream
from mtpbuild.runtime.thought import Thought
from mtpbuild.runtime.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "cancelled"]
log = logging.getLogger("mtpbuild")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Holds log-probabilities at one position, under the plain softmax of the logits."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the N most probable tokens, the most probable first
    rank: int = 0  # of a prompt's token: 1 for the most probable one


@dataclass(frozen=True, slots=True)
class Chunk:
    """Is what a decode step gave; text may lag behind its tokens, never the other way round."""

    spans: tuple[Span, ...]  # the new text, in pieces, each with the origin of its token
    token_ids: tuple[int, ...]
    from_draft: tuple[bool, ...]  # per token: an accepted draft (True) or the model's own (False)
    finish_reason: FinishReason | None = None  # in the last chunk, as are the next two
    stop_reason: str | int | None = None  # which of the request's stop strings or tokens ended it
    metrics: RequestMetrics | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None  # per token, if asked for
    # In the first chunk: of the prompt's tokens behind its first one, if asked for.
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    # Per token: how many characters the request's tokens before it have given. A stop string that
    # is cut off counts, so the text may be shorter.
    starts: tuple[int, ...] = ()
    reasoning_tokens: int = 0  # of all tokens so far, where thoughts are split off

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


@dataclass(frozen=True, slots=True)
class Result:
    """Holds a request's text, tokens and figures."""

    text: str
    token_ids: list[int]
    from_draft: list[bool] = field(repr=False)
    finish_reason: FinishReason
    metrics: RequestMetrics = field(repr=False)
    seed: int | None
    logprobs: list[TokenLogprobs] | None = field(default=None, repr=False)  # if asked for
    prompt_logprobs: list[TokenLogprobs] | None = field(default=None, repr=False)
    # Not empty: drafts were accepted by chance, at these rates, and the text means nothing.
    synthetic_acceptance_rates: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatResult(Result):
    """Is the result of a conversation: `text` is all of it, thought and marks included."""

    content: str = ""
    reasoning_content: str = ""  # the thought, if the model marks it

    @classmethod
    def of(cls, result: Result, pieces: Sequence[Piece] | None = None) -> Self:
        """Join a result's pieces by their kind; without any all of its text is content."""
        found = {each.name: getattr(result, each.name) for each in fields(Result)}
        if pieces is None:
            return cls(**found, content=result.text)
        thought, content = (
            "".join(piece.text for piece in pieces if piece.kind == kind)
            for kind in ("reasoning", "content")
        )
        return cls(**found, content=content, reasoning_content=thought)

    @property
    def message(self) -> dict[str, str]:
        """Returns the answer as a message of the conversation."""
        said = {"role": "assistant", "content": self.content}
        thought = {"reasoning_content": self.reasoning_content}
        return said | (thought if self.reasoning_content else {})


class Observer(Protocol):
    """Watches the steps of a request; the thread that steps the loop calls it."""

    def step(self, request: "Request", output: StepOutput, slot: int) -> None:
        """Sees a decode step before the request takes its tokens; must not keep the arrays."""

    def end(self, request: "Request", reason: FinishReason) -> None:
        """Sees that the request has all its tokens; not called for one that failed."""


def failed(error: BaseException) -> RequestFailedError:
    """Return the error of a request that the host's own code failed at; log the code's."""
    log.error("a request failed in the host's own code", exc_info=error)
    failure = RequestFailedError(f"the request failed: {first_line(error)}")
    failure.__cause__ = error
    return failure


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name if it has none."""
    line = str(error).partition("\n")[0] or type(error).__name__
    return line.encode("utf-8", "backslashreplace").decode()


class Request:
    """Is a request in flight. Only the thread that steps the loop changes it.

    `outbox` holds the chunks that the caller has not taken; each new one calls `listener`.
    """

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        manifest: Manifest,
        tokenizer: Tokenizer | None,
        listener: Callable[[], None] = lambda: None,
        observer: Observer | None = None,
    ) -> None:
        self.prompt, self.params, self.listener = prompt, params, listener
        self.observer = observer
        self.token_ids: list[int] = []
        self.from_draft: list[bool] = []
        self.finish_reason: FinishReason | None = None
        self.error: MtpbuildError | None = None
        self.grammar: Grammar | None = None  # the form that its tokens must follow
        self.forced = 0  # tokens that the grammar made certain before they were judged
        self.cancelled = False  # the loop ends a cancelled request before its next step
        self.outbox: deque[Chunk] = deque()
        self.acceptance = Acceptance(manifest.build.nextn)
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.controls = controls_of(prompt, params, manifest, tokenizer)
        self.synthetic = rates_of(params, manifest.build.nextn)
        self.seed = self.controls.seed if params.temperature > 0 else params.seed
        self._limit = min(params.max_tokens, manifest.build.max_seq_len - len(prompt))
        self._end_ids = end_ids(params, manifest)
        marks = manifest.model.thinking_token_ids if params.split_thought else None
        self._thought = Thought(marks, self.controls.thinking) if marks else None
        self._starts: list[int] = []
        self._text = TextStream(
            tokenizer,
            params.stop,
            params.shown_tokens,
            with_stop=params.include_stop_str_in_output,
            marks=manifest.model.thinking_token_ids or (),
            thought=self._thought,
            stop_in_thought=params.stop_in_thought,
        )
        self._pieces: list[str] = []
        self.cached_tokens = 0  # of the prompt: their cache rows were there already
        self._submitted = time.perf_counter()
        self.started: float | None = None  # when it got a slot
        self._first = self._last = 0.0

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def length(self) -> int:
        """Returns the number of committed cache rows: one for each known token but the newest."""
        return len(self.prompt) + len(self.token_ids) - 1

    def start(self) -> None:
        """Notes the time at which the request got a slot."""
        self.started = time.perf_counter()

    def receive(
        self,
        tokens: list[int],
        drafted: int,
        logprobs: Sequence[TokenLogprobs] = (),
        totals: Acceptance | None = None,
    ) -> int:
        """Takes one step's tokens [n]: n - 1 accepted drafts of `drafted`, then the model's own.

        If the request ends at one of them, the rest is dropped. logprobs: one for each token, if
        the request asks for them. totals: counts the steps of all requests. Returns how many tokens
        the request has kept.
        """
        assert tokens, "a step of an active slot emits at least one token"
        accepted, had = len(tokens) - 1, len(self.token_ids)
        self._last = time.perf_counter()
        self._first = self._first or self._last
        reason: FinishReason | None = None
        for i, token in enumerate(tokens):
            self.token_ids.append(token)
            self.from_draft.append(i < accepted)
            self.forced += self.grammar is not None and self.grammar.kept <= i < accepted
            reason = self._read(token, i < accepted)
            if reason:
                break
            if self.grammar and not self._follow(token):
                return 0
        kept = len(self.token_ids) - had
        for counts in (self.acceptance, *([totals] if totals else [])):
            counts.add(accepted, drafted, kept)
        self.logprobs += logprobs[:kept]
        self._publish(had, reason)  # whoever gets the tokens may ask for the counts at once
        return kept

    def end(self, reason: FinishReason) -> None:
        """Ends the request with the tokens that it has."""
        self._publish(len(self.token_ids), reason)

    @property
    def wants_tokens(self) -> bool:
        """Tells whether it wants an answer, not the prompt's scores alone."""
        return self.params.max_tokens > 0

    def fail(self, error: MtpbuildError) -> None:
        """End the request with an error, and wake whoever waits for it."""
        self.error = error
        with contextlib.suppress(Exception):  # the waiter is gone
            self.listener()

    @contextlib.contextmanager
    def contain(self) -> Iterator[None]:
        """Fail this request alone if the block raises; one that has its answer keeps it.

        What ends everybody passes: a program's own failure, a rank that is gone, Ctrl-C.
        """
        try:
            yield
        except (StepError, RankError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a panic of Rust's code, too, which is no Exception
            failure = error if isinstance(error, MtpbuildError) else failed(error)
            if self.finish_reason is None:
                self.fail(failure)

    def result(self) -> Result:
        """Returns the result of a request that has ended."""
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

    def _follow(self, token: int) -> bool:
        """Gives the grammar a token that does not end the request; False: it can't go on."""
        assert self.grammar is not None
        try:
            self.grammar.take(token)
        except RequestError as error:
            self.fail(error)
        return self.error is None

    def _read(self, token: int, from_draft: bool) -> FinishReason | None:
        """Appends the newest token's text; returns why the request ends with it, if it does."""
        count = len(self.token_ids)
        self._starts.append(self._text.length)
        may_stop = count >= self.params.min_tokens
        ends = may_stop and token in self._end_ids
        if ends or self._text.push(token, from_draft, may_stop=may_stop):
            return "stop"
        return "length" if count >= self._limit else None

    def _reasoning_tokens(self) -> int:
        """Returns how many tokens are a thought: all, if it has begun and not ended."""
        if self._thought is None:
            return 0
        return len(self.token_ids) if self._thought.thinking else self._thought.tokens

    def _stop_reason(self) -> str | int | None:
        newest = self.token_ids[-1]
        return self._text.stopped_by or (newest if newest in self.params.stop_token_ids else None)

    def _publish(self, had: int, reason: FinishReason | None) -> None:
        """Adds a chunk: the tokens behind the first `had`, and the text that is certain."""
        spans = self._text.take(everything=reason is not None)
        self._pieces += [span.text for span in spans]
        if self.observer and reason:
            self.observer.end(self, reason)
        self.outbox.append(
            Chunk(
                spans,
                tuple(self.token_ids[had:]),
                tuple(self.from_draft[had:]),
                reason,
                self._stop_reason() if reason == "stop" else None,
                self.metrics() if reason else None,
                None if self.params.logprobs is None else tuple(self.logprobs[had:]),
                tuple(self.prompt_logprobs) if had == 0 and self.prompt_logprobs else None,
                tuple(self._starts[had:]),
                self._reasoning_tokens(),
            )
        )
        self.finish_reason = reason  # last: other threads read it without a lock
        self.listener()
