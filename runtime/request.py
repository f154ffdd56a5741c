"""A request: what the caller asks, what it has got so far, and when it ends."""

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mtpbuild.runtime.errors import EngineError, RequestError
from mtpbuild.runtime.manifest import Manifest
from mtpbuild.runtime.programs.base import Controls
from mtpbuild.runtime.stats import Acceptance, RequestMetrics
from mtpbuild.runtime.text import Span, TextStream
from mtpbuild.runtime.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt; raises RequestError for a value that can't be.

    Temperature 0 is greedy. Above it, `acceptance` "strict" gives the text that an engine without
    drafts samples with the same seed; "rejection" has the same distribution but a text that depends
    on nextn. `draft_sample_method` is vLLM's: "probabilistic" drafts are sampled, "greedy" ones are
    argmax. `relaxed_topk` > 1 accepts, in the thinking phase of a greedy request, a draft among the
    most probable tokens within `relaxed_delta` of the first (TensorRT-LLM's relaxed acceptance);
    the phase's tokens are the engine's own or `begin_` and `end_thinking_phase_token`.

    A stop token or end of sequence is part of the result's token ids but not of its text; a stop
    string is cut off the text. Before `min_tokens` tokens neither ends the request.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    acceptance: Literal["strict", "rejection"] = "strict"
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"
    relaxed_topk: int = 1
    relaxed_delta: float = 0.0
    begin_thinking_phase_token: int | None = None
    end_thinking_phase_token: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple_of(str, stop, "stop"))
        object.__setattr__(
            self, "stop_token_ids", _tuple_of(int, self.stop_token_ids, "stop_token_ids")
        )
        if "" in self.stop:
            raise RequestError("stop: a stop string is empty")
        if not _is_int(self.max_tokens) or self.max_tokens < 1:
            raise RequestError(f"max_tokens must be a number from 1, not {self.max_tokens!r}")
        if not _is_int(self.min_tokens) or not 0 <= self.min_tokens <= self.max_tokens:
            raise RequestError(f"min_tokens must be 0..max_tokens, not {self.min_tokens!r}")
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed < 2**64):
            raise RequestError(f"seed must be a whole number below 2**64, not {self.seed!r}")
        self._check_sampling()

    def _check_sampling(self) -> None:
        _check_range("temperature", self.temperature, 0, 100)
        _check_range("top_p", self.top_p, 0, 1)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("relaxed_delta", self.relaxed_delta, 0, 1)
        if self.top_p == 0:
            raise RequestError("top_p must be above 0")
        if not _is_int(self.top_k) or self.top_k < -1:
            raise RequestError(f"top_k must be a number from 1, or 0 for off, not {self.top_k!r}")
        if not _is_int(self.relaxed_topk) or self.relaxed_topk < 1:
            raise RequestError(f"relaxed_topk must be a number from 1, not {self.relaxed_topk!r}")
        if self.relaxed_topk > 1 and self.temperature > 0:
            raise RequestError("relaxed acceptance is for greedy requests: set temperature to 0")
        for name, choices in (
            ("acceptance", ("strict", "rejection")),
            ("draft_sample_method", ("probabilistic", "greedy")),
        ):
            if getattr(self, name) not in choices:
                raise RequestError(f"{name} must be one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one decode step gave; text may lag behind its tokens, never the other way round."""

    spans: tuple[Span, ...]  # the new text, in pieces, each with the origin of its token
    token_ids: tuple[int, ...]
    from_draft: tuple[bool, ...]  # per token: an accepted draft (True) or the model's own (False)
    finish_reason: FinishReason | None = None  # in the last chunk, as are the metrics
    metrics: RequestMetrics | None = None

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


@dataclass(frozen=True, slots=True)
class Result:
    """All that a request gave."""

    text: str
    token_ids: list[int]
    from_draft: list[bool] = field(repr=False)
    finish_reason: FinishReason
    metrics: RequestMetrics = field(repr=False)
    seed: int | None


class Request:
    """One request in flight. Only the thread that steps the loop changes it.

    `outbox` holds the chunks that the caller has not taken; `listener` is told of each new one.
    """

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        manifest: Manifest,
        tokenizer: Tokenizer | None,
        listener: Callable[[], None] = lambda: None,
    ) -> None:
        self.prompt, self.params, self.listener = prompt, params, listener
        self.token_ids: list[int] = []
        self.from_draft: list[bool] = []
        self.finish_reason: FinishReason | None = None
        self.error: EngineError | None = None
        self.cancelled = False  # asked for; the loop ends the request before its next step
        self.outbox: deque[Chunk] = deque()
        self.acceptance = Acceptance(manifest.build.nextn)
        self.controls = _controls(prompt, params, manifest)
        self.seed = self.controls.seed if params.temperature > 0 else params.seed
        self._limit = min(params.max_tokens, manifest.build.max_seq_len - len(prompt))
        ends = () if params.ignore_eos else manifest.model.eos_token_ids
        self._end_ids = frozenset(ends) | frozenset(params.stop_token_ids)
        self._text = TextStream(tokenizer, params.stop)
        self._pieces: list[str] = []
        self._submitted = self._started = time.perf_counter()
        self._first = self._last = 0.0

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def length(self) -> int:
        """Rows of the cache that are committed: all known tokens but the newest."""
        return len(self.prompt) + len(self.token_ids) - 1

    def start(self) -> None:
        """The request has got a slot."""
        self._started = time.perf_counter()

    def receive(self, tokens: list[int], drafted: int) -> None:
        """Take one step's tokens [n]: n - 1 accepted drafts of `drafted`, then the model's own.

        The request may end within them; the rest is dropped.
        """
        assert tokens, "a step of an active slot emits at least one token"
        accepted, had = len(tokens) - 1, len(self.token_ids)
        self.acceptance.add(accepted, drafted)
        self._last = time.perf_counter()
        self._first = self._first or self._last
        for i, token in enumerate(tokens):
            self.token_ids.append(token)
            self.from_draft.append(i < accepted)
            self.finish_reason = self._read(token, i < accepted)
            if self.finish_reason:
                break
        self._publish(had)

    def cancel(self) -> None:
        """End the request as it is."""
        self.finish_reason = "cancelled"
        self._publish(len(self.token_ids))

    def fail(self, error: EngineError) -> None:
        self.error = error
        self.listener()

    def result(self) -> Result:
        """Of a request that has ended."""
        assert self.finish_reason
        return Result(
            "".join(self._pieces),
            self.token_ids,
            self.from_draft,
            self.finish_reason,
            self.metrics(),
            self.seed,
        )

    def metrics(self) -> RequestMetrics:
        n = len(self.token_ids)
        return RequestMetrics(
            prompt_tokens=len(self.prompt),
            output_tokens=n,
            ttft_s=self._first - self._submitted if n else None,
            tpot_s=(self._last - self._first) / (n - 1) if n > 1 else None,
            tokens_per_s=n / (self._last - self._started) if n else 0.0,
            speculative_decoding=self.acceptance.report(),
        )

    def _read(self, token: int, from_draft: bool) -> FinishReason | None:
        """Append the newest token's text; tells whether the request ends with this token."""
        count = len(self.token_ids)
        may_stop = count >= self.params.min_tokens
        if may_stop and token in self._end_ids:
            return "stop"
        if self._text.push(token, from_draft, may_stop=may_stop):
            return "stop"
        return "length" if count >= self._limit else None

    def _publish(self, had: int) -> None:
        """Hand over the tokens behind the first `had`, and the text that can be released."""
        spans = self._text.take(everything=self.finish_reason is not None)
        self._pieces += [span.text for span in spans]
        self.outbox.append(
            Chunk(
                spans,
                tuple(self.token_ids[had:]),
                tuple(self.from_draft[had:]),
                self.finish_reason,
                self.metrics() if self.finish_reason else None,
            )
        )
        self.listener()


def _controls(prompt: list[int], params: SamplingParams, manifest: Manifest) -> Controls:
    own = manifest.model.thinking_token_ids or (-1, -1)
    asked = (params.begin_thinking_phase_token, params.end_thinking_phase_token)
    marks = tuple(b if a is None else a for a, b in zip(asked, own, strict=True))
    if params.relaxed_topk > 1 and -1 in marks:
        raise RequestError(
            "relaxed acceptance needs the tokens of the thinking phase, which this engine does not "
            "know: give begin_thinking_phase_token and end_thinking_phase_token"
        )
    return Controls(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        rejection=params.acceptance == "rejection",
        sampled_drafts=params.draft_sample_method == "probabilistic",
        relaxed_topk=params.relaxed_topk,
        relaxed_delta=params.relaxed_delta,
        thinking_ids=(marks[0], marks[1]),
        thinking=next((t == marks[0] for t in reversed(prompt) if t in marks), False),
        seed=secrets.randbits(32) if params.seed is None else params.seed,
    )


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise RequestError(f"{name} must be a number in {least}..{most}, not {value!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tuple_of(kind: type, values: object, name: str) -> tuple[object, ...]:
    if isinstance(values, list | tuple | set | frozenset):
        items: tuple[object, ...] = tuple(values)
        if all(isinstance(item, kind) and not isinstance(item, bool) for item in items):
            return items
    raise RequestError(f"{name} must be a list of {kind.__name__}, not {values!r}")
