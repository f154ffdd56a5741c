"""What a caller asks of a request, and what the programs are told of it."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mtpbuild.runtime.controls import MAX_BANNED, MAX_LOGPROBS, Controls
from mtpbuild.runtime.errors import RequestError
from mtpbuild.runtime.manifest import Manifest
from mtpbuild.runtime.synthetic import check_rates, conditional, synthetic_rates


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt; raises RequestError for a value that can't be.

    Temperature 0 is greedy. Above it, `acceptance` "strict" gives the text that an engine without
    drafts samples with the same seed; "rejection" has the same distribution but a text that depends
    on nextn. `draft_sample_method` is vLLM's: "probabilistic" drafts are sampled, "greedy" ones are
    argmax. `relaxed_topk` > 1 accepts, in the thinking phase of a greedy request, a draft among the
    most probable tokens within `relaxed_delta` of the first (TensorRT-LLM's relaxed acceptance);
    the phase's tokens are the engine's own or `begin_` and `end_thinking_phase_token`.

    `rejection_sample_method` is vLLM's too: "block" judges a step's drafts together; "synthetic" is
    for benchmarks only and accepts by chance, with one rate per draft position (unconditional,
    non-increasing) or with a mean acceptance length: its text is meaningless.

    A stop token or end of sequence is part of the result's token ids but not of its text; a stop
    string is cut off the text. Before `min_tokens` tokens the former are not emitted and the latter
    do not end the request. `logprobs` N reports each token's log-probability, before temperature
    and filters, and the N most probable tokens (0: none of them).
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
    rejection_sample_method: Literal["standard", "block", "synthetic"] = "standard"
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"
    synthetic_acceptance_rates: Sequence[float] | None = None
    synthetic_acceptance_length: float | None = None
    relaxed_topk: int = 1
    relaxed_delta: float = 0.0
    begin_thinking_phase_token: int | None = None
    end_thinking_phase_token: int | None = None
    logprobs: int | None = None

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
            ("rejection_sample_method", ("standard", "block", "synthetic")),
            ("draft_sample_method", ("probabilistic", "greedy")),
        ):
            if getattr(self, name) not in choices:
                raise RequestError(f"{name} must be one of {', '.join(choices)}")
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
            if not _is_int(self.logprobs):
                raise RequestError(f"logprobs must be a whole number, not {self.logprobs!r}")
        self._check_rejection()

    def _check_rejection(self) -> None:
        method, rates = self.rejection_sample_method, self.synthetic_acceptance_rates
        given = (rates is not None) + (self.synthetic_acceptance_length is not None)
        if method != "standard" and self.acceptance != "rejection":
            raise RequestError(f'rejection_sample_method {method} needs acceptance "rejection"')
        if given != (method == "synthetic"):
            raise RequestError(
                'rejection_sample_method "synthetic", and no other, needs exactly one of '
                "synthetic_acceptance_rates and synthetic_acceptance_length"
            )
        if rates is not None:
            object.__setattr__(self, "synthetic_acceptance_rates", check_rates(rates))
        if self.synthetic_acceptance_length is not None:
            _check_range("synthetic_acceptance_length", self.synthetic_acceptance_length, 1, 16)

    @property
    def synthetic(self) -> bool:
        """Whether the text is meaningless: drafts are accepted by chance."""
        return self.rejection_sample_method == "synthetic"


def controls_of(prompt: list[int], params: SamplingParams, manifest: Manifest) -> Controls:
    """What the programs are told of a request; raises RequestError if the engine can't do it."""
    own = manifest.model.thinking_token_ids or (-1, -1)
    asked = (params.begin_thinking_phase_token, params.end_thinking_phase_token)
    marks = tuple(b if a is None else a for a, b in zip(asked, own, strict=True))
    if params.relaxed_topk > 1 and -1 in marks:
        raise RequestError(
            "relaxed acceptance needs the tokens of the thinking phase, which this engine does not "
            "know: give begin_thinking_phase_token and end_thinking_phase_token"
        )
    banned = tuple(sorted(end_ids(params, manifest))) if params.min_tokens else ()
    if len(banned) > MAX_BANNED:
        raise RequestError(f"min_tokens works with at most {MAX_BANNED} stop tokens: {len(banned)}")
    return Controls(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        rejection=params.acceptance == "rejection",
        block=params.rejection_sample_method == "block",
        synthetic=conditional(rates_of(params, manifest.build.nextn)),
        sampled_drafts=params.draft_sample_method == "probabilistic",
        relaxed_topk=params.relaxed_topk,
        relaxed_delta=params.relaxed_delta,
        thinking_ids=(marks[0], marks[1]),
        thinking=next((t == marks[0] for t in reversed(prompt) if t in marks), False),
        banned_ids=banned,
        banned_until=len(prompt) + params.min_tokens if banned else 0,
        alternatives=params.logprobs is not None,
        seed=secrets.randbits(32) if params.seed is None else params.seed,
    )


def end_ids(params: SamplingParams, manifest: Manifest) -> frozenset[int]:
    """Tokens that end the request."""
    ends = () if params.ignore_eos else manifest.model.eos_token_ids
    return frozenset(ends) | frozenset(params.stop_token_ids)


def rates_of(params: SamplingParams, nextn: int) -> tuple[float, ...]:
    """Of synthetic acceptance, per draft position; () if acceptance is real."""
    rates, length = params.synthetic_acceptance_rates, params.synthetic_acceptance_length
    return synthetic_rates(None if rates is None else tuple(rates), length, nextn)


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
