"""SamplingParams is what a caller asks of a request; here it becomes what programs are told."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from mtpbuild.runtime.checks import SETTINGS, biases, whole_number
from mtpbuild.runtime.contract.controls import (
    MAX_BANNED,
    MAX_BIASES,
    MAX_LOGPROBS,
    Controls,
)
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.errors import RequestError
from mtpbuild.runtime.structured import StructuredOutputs
from mtpbuild.runtime.synthetic import check_synthetic, conditional, synthetic_rates
from mtpbuild.runtime.targets import targets_with


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Says how to continue a prompt; raises RequestError for a value that can't be.

    Temperature 0 is greedy. Above it, `acceptance` "strict" gives the text that an engine without
    drafts samples with the same seed; "rejection" has the same distribution but a text that depends
    on nextn. `draft_sample_method` is vLLM's: "probabilistic" drafts are sampled, "greedy" ones are
    argmax. `relaxed_topk` > 1 accepts, in the thinking phase of a greedy request, a draft among the
    most probable tokens within `relaxed_delta` of the first (TensorRT-LLM's relaxed acceptance);
    the phase's tokens are the engine's own or `begin_` and `end_thinking_phase_token`.

    `rejection_sample_method` is vLLM's too: "block" judges a step's drafts together; "synthetic" is
    for benchmarks only and accepts by chance, with one rate per draft position (unconditional,
    non-increasing) or with a mean acceptance length: its text is meaningless.

    `presence_penalty` and `frequency_penalty` (-2..2, 0: off) count the output's tokens,
    `repetition_penalty` (above 0, 1: off) those of prompt and output; `logit_bias` adds -100..100
    to the logits of token ids. They are vLLM's, act before temperature and filters, and act on
    each token as if those before it had been decoded one by one, whatever nextn is.

    A stop token or end of sequence is part of the result's token ids but not of its text; a stop
    string is cut off the text. Before `min_tokens` tokens the former are not emitted and the latter
    do not end the request. `logprobs` N reports each token's log-probability, before temperature
    and filters, and the N most probable tokens (0: none of them). A special token adds nothing to
    the text, unless it is one of `shown_tokens`: then its name is text.

    `structured_outputs` holds the answer to a form; where the prompt has opened a thought, from the
    thought's end on.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
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
    structured_outputs: StructuredOutputs | None = None
    shown_tokens: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name, read in CHECKS.items():
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            try:
                object.__setattr__(self, name, read(value))
            except ValueError as error:
                raise RequestError(f"{name} {error}") from None
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens must be 0..max_tokens, not {self.min_tokens}")
        if "" in self.stop:
            raise RequestError("stop: a stop string is empty")
        if self.top_p == 0:
            raise RequestError("top_p must be above 0")
        if self.relaxed_topk > 1 and self.temperature > 0:
            raise RequestError("relaxed acceptance is for greedy requests: set temperature to 0")
        method = self.rejection_sample_method
        if method != "standard" and self.acceptance != "rejection":
            raise RequestError(f'rejection_sample_method {method} needs acceptance "rejection"')
        if self.structured_outputs is not None:
            self._check_structured()
        check_synthetic(method, self.synthetic_acceptance_rates, self.synthetic_acceptance_length)

    def _check_structured(self) -> None:
        """Raise RequestError for what would emit tokens that the form forbids, or go beyond it."""
        if not isinstance(self.structured_outputs, StructuredOutputs):
            raise RequestError("structured_outputs must be a StructuredOutputs")
        against = {"min_tokens": self.min_tokens > 0, "ignore_eos": self.ignore_eos}
        for name, given in (against | {"synthetic acceptance": self.synthetic}).items():
            if given:
                raise RequestError(f"structured_outputs can't go with {name}")

    @property
    def synthetic(self) -> bool:
        """Says whether the text is meaningless because drafts are accepted by chance."""
        return self.rejection_sample_method == "synthetic"


CHECKS = SETTINGS | {"logprobs": whole_number(0, MAX_LOGPROBS), "logit_bias": biases(MAX_BIASES)}
OPTIONAL = {param.name for param in fields(SamplingParams) if param.default is None}


def controls_of(prompt: list[int], params: SamplingParams, manifest: Manifest) -> Controls:
    """Says a request's wishes in the programs' words; RequestError if the engine can't do it."""
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
    asked_for = penalties_of(params)
    if asked_for and Feature.PENALISE not in manifest.features:
        raise RequestError(
            f"{asked_for[0]} is not supported by this engine: leave it out, or build "
            f"the engine anew for target {targets_with(Feature.PENALISE)}"
        )
    bias = params.logit_bias or {}
    for id in bias:
        if id >= manifest.model.vocab_size:
            last = manifest.model.vocab_size - 1
            raise RequestError(f"logit_bias: token id {id} is outside the vocabulary 0..{last}")
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
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        prompt_length=len(prompt) if asked_for else 0,
        bias_ids=tuple(bias),
        bias_values=tuple(bias.values()),
        history=tuple(prompt) if params.repetition_penalty != 1 else (),
        alternatives=params.logprobs is not None,
        constrained=params.structured_outputs is not None,
        seed=secrets.randbits(32) if params.seed is None else params.seed,
    )


# Each penalty, and its value that asks for nothing.
PENALTIES = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}


def penalties_of(params: SamplingParams) -> list[str]:
    """The fields by which a request edits the model's logits."""
    on = [name for name, off in PENALTIES.items() if getattr(params, name) != off]
    return on + ["logit_bias"] * bool(params.logit_bias)


def end_ids(params: SamplingParams, manifest: Manifest) -> frozenset[int]:
    """The tokens that end the request."""
    ends = () if params.ignore_eos else manifest.model.eos_token_ids
    return frozenset(ends) | frozenset(params.stop_token_ids)


def rates_of(params: SamplingParams, nextn: int) -> tuple[float, ...]:
    """The rates of synthetic acceptance, per draft position; () if acceptance is real."""
    rates, length = params.synthetic_acceptance_rates, params.synthetic_acceptance_length
    return synthetic_rates(rates, length, nextn)
