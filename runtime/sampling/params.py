"""SamplingParams, whose fields are the one table of a request's settings."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from mtpbuild.runtime.checks import (
    NEXTN_LIMIT,
    Check,
    check_biases,
    check_bool,
    check_choice,
    check_instance,
    check_integer,
    check_list,
    check_number,
    check_object,
    check_rates,
    check_text,
    parse_list,
    parse_object,
)
from mtpbuild.runtime.contract.rules import (
    REQUESTABLE,
    all_rules,
    explain_missing_rule,
    find_rule,
    rule_names,
)
from mtpbuild.runtime.contract.settings import (
    MAX_BIASES,
    MAX_LOGPROBS,
    Setting,
    declarations,
    judging,
    noted,
    penalty,
    private,
    setting,
    shaping,
)
from mtpbuild.runtime.errors import RequestError
from mtpbuild.runtime.sampling.structured_outputs import StructuredOutputs
from mtpbuild.runtime.sampling.synthetic import check_synthetic

if TYPE_CHECKING:
    from mtpbuild.runtime.contract.manifest import Manifest

MAX_STOPS = 64  # stop strings; the text of each token is searched for all of them
MAX_STOP = 1024  # characters of a stop string
MAX_SALT = 256  # characters of a request's cache_salt
MAX_WORD = 256  # characters of a text in bad_words
MAX_STOP_IDS = 1024
MAX_TOKENS = 2**18  # tokens in a list of ids; no vocabulary is larger
# At this temperature even neighbouring float32 logits are so far apart that only the most probable
# token is left. Division by a lower temperature would overflow.
COLDEST = 1e-20

token, share, signed = check_integer(0), check_number(0, 1), check_number(-2, 2)
token_ids = partial(check_list, "int", token)


def texts(longest: int, max_texts: int) -> Check:
    """Return a check for a list of up to `max_texts` texts of up to `longest` characters."""
    return check_list("str", check_text(0, longest), max_texts)


def read_temperature(value: object) -> float:
    """Check a temperature; if it is too low to make a difference, return `COLDEST`."""
    temperature: float = check_number(0, 100)(value)
    return max(temperature, COLDEST) if temperature else 0.0


def check_rule_name(value: object) -> str:
    """Check the name of an acceptance rule, built in or of an installed package."""
    return str(value) if value in REQUESTABLE else check_choice(*REQUESTABLE, *rule_names())(value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The settings for continuing a prompt; RequestError for an invalid value.

    Two ideas concern several fields. `acceptance` decides which drafts a step keeps: "strict" gives
    the text that an engine without drafts samples with the same seed; "rejection" has the same
    distribution, but its text depends on nextn. `relaxed_topk` and the synthetic rates change the
    distribution.

    A request stops at a stop token, which is part of its token ids but not of its text, or at a
    stop string, which is cut off the text. Penalties, biases and lists of allowed tokens apply to
    each token as if the tokens before it had been decoded one by one, whatever nextn is.
    """

    max_tokens: int = private(256, check_integer(0), "End after so many tokens.")
    _: KW_ONLY
    temperature: float = shaping(0.0, read_temperature, "0: greedy.")
    top_k: int = shaping(
        0, check_integer(-1), "Sample from so many tokens, the most probable; 0: all."
    )
    top_p: float = shaping(
        1.0, share, "Sample from the most probable tokens with this much probability."
    )
    min_p: float = shaping(0.0, share, "Least probability of a token, as a share of the largest.")
    # TensorRT-LLM's relaxed acceptance: in the thinking phase of a greedy request, accept a draft
    # that is among so many most probable tokens.
    relaxed_topk: int = noted(
        1, check_integer(1), "Relaxed: accept one of so many most probable tokens."
    )
    # .. and at most so much less probable than the first one.
    relaxed_delta: float = noted(
        0.0, share, "Relaxed: accept a token so much less probable than the first."
    )
    # Subtract it from the logits of tokens in the output, before temperature and filters, as vLLM
    # does; -2..2, 0: off.
    presence_penalty: float = penalty(
        0.0, signed, "Subtract it from the logits of tokens in the output; -2..2."
    )
    frequency_penalty: float = penalty(
        0.0, signed, "Subtract it once for each time that the output has a token; -2..2."
    )
    repetition_penalty: float = penalty(
        1.0, check_number(0.01, 100), "Above 1: tokens of prompt and output become less probable."
    )
    # Before so many tokens stop tokens are not emitted, and stop strings do not end the request.
    min_tokens: int = noted(0, check_integer(0), "Don't end before so many tokens.")
    stop: Sequence[str] = setting(
        (), texts(MAX_STOP, MAX_STOPS), "End before this text; may be repeated."
    )
    # Keep the stop string in the text.
    include_stop_str_in_output: bool = setting(False, check_bool)
    # Tokens that end the request.
    stop_token_ids: Sequence[int] = setting((), token_ids(MAX_STOP_IDS), tokens=True)
    # Set by chats: tell thought and answer apart; stop strings count only after the thought.
    split_thought: bool = private(False, check_bool)
    # Stop strings count in the thought, too.
    stop_in_thought: bool = private(False, check_bool)
    ignore_eos: bool = setting(False, check_bool, "Go on after the end of sequence.")
    # Token id -> what is added to its logit, -100..100.
    logit_bias: Mapping[int, float] | None = penalty(
        None,
        check_biases(MAX_BIASES),
        """Add to the logits of token ids: '{"5": -100, "7": 2.5}'.""",
        parse=partial(parse_object, example='{"5": -100}'),
        tokens=True,
    )
    # The only tokens of an answer, including its thought and the end of sequence.
    allowed_token_ids: Sequence[int] | None = penalty(None, token_ids(MAX_TOKENS), tokens=True)
    # Texts that an answer may not contain, in vLLM's spellings: at the start of a text and after a
    # space.
    bad_words: Sequence[str] = penalty((), texts(MAX_WORD, MAX_BIASES))
    # Seed for sampling, -2**63..2**64 - 1; negative seeds are taken modulo 2**64.
    seed: int | None = setting(
        None, check_integer(-(2**63), 2**64 - 1), "Seed for sampling.", everywhere=True
    )
    # "strict", "rejection", or a rule that the engine was built with (`build --acceptance-rule`).
    acceptance: Literal["strict", "rejection"] | str = judging(
        "strict",
        check_rule_name,
        "strict (default); rejection, above temperature 0; or a rule that the engine has.",
    )
    # The settings of such a rule.
    acceptance_settings: Mapping[str, Any] | None = noted(None, check_object, http=False)
    # "block" verifies a step's drafts together. "synthetic" accepts by chance, for benchmarks only:
    # its text is meaningless.
    rejection_sample_method: Literal["standard", "block", "synthetic"] = judging(
        "standard",
        check_choice("standard", "block", "synthetic"),
        "standard (default), block, or synthetic: for timing only.",
    )
    # "probabilistic" drafts are sampled above temperature 0, "greedy" ones are the argmax.
    draft_sample_method: Literal["probabilistic", "greedy"] = noted(
        "probabilistic", check_choice("probabilistic", "greedy")
    )
    # One rate per draft position, unconditional and non-increasing.
    synthetic_acceptance_rates: Sequence[float] | None = judging(
        None,
        check_rates,
        "Synthetic: the share of steps that accept draft 1, 2..: 0.9,0.7",
        parse=partial(parse_list, kind=float, example="0.9,0.7,0.5"),
        http=False,
    )
    # A mean acceptance length in place of the rates.
    synthetic_acceptance_length: float | None = judging(
        None, check_number(1, NEXTN_LIMIT + 1), "Synthetic: mean tokens per step.", http=False
    )
    # The token that begins the thinking phase; None: the engine's own.
    begin_thinking_phase_token: int | None = private(None, token, tokens=True)
    # The token that ends the thinking phase; None: the engine's own.
    end_thinking_phase_token: int | None = private(None, token, tokens=True)
    # Report each token's log-probability, before temperature and filters, and the N most probable
    # tokens (0: none of them).
    logprobs: int | None = private(
        None,
        check_integer(0, MAX_LOGPROBS),
        "With --json: log-probabilities of the tokens, and of the N most probable (to 20).",
    )
    # The same for the prompt's tokens after the first, if the engine was built with `--score`;
    # `max_tokens` may then be 0.
    prompt_logprobs: int | None = setting(None, check_integer(0, MAX_LOGPROBS))
    # The form of the answer. If the prompt has opened a thought, it begins after the thought.
    structured_outputs: StructuredOutputs | None = penalty(
        None, check_instance(StructuredOutputs), http=False
    )
    # Reuse the rows of earlier prompts only if these had the same salt.
    cache_salt: str | None = setting(None, check_text(1, MAX_SALT))
    # Special tokens whose names are added to the text; others add no text.
    shown_tokens: Sequence[int] = private((), token_ids(MAX_TOKENS), tokens=True)
    # Seconds that the request may take, its wait for a slot included; then a DeadlineError ends it.
    timeout: float | None = setting(None, check_number(0, 10**9))

    def __post_init__(self) -> None:
        for name, declared in SETTINGS.items():
            if (value := getattr(self, name)) is not None or DEFAULTS[name] is not None:
                try:
                    object.__setattr__(self, name, declared.check(value))
                except ValueError as error:
                    raise RequestError(f"{name} {error}", name) from None
        if (least := self.min_tokens) > self.max_tokens:
            raise RequestError(f"min_tokens must be 0..max_tokens, not {least}", "min_tokens")
        if "" in self.stop:
            raise RequestError("stop: a stop string is empty", "stop")
        if self.allowed_token_ids == ():
            raise RequestError("allowed_token_ids: the list is empty", "allowed_token_ids")
        if self.top_p == 0:
            raise RequestError("top_p must be above 0", "top_p")
        if self.relaxed_topk > 1 and self.temperature > 0:
            wrong = "relaxed acceptance is for greedy requests: set temperature to 0"
            raise RequestError(f"relaxed_topk: {wrong}", "relaxed_topk")
        method = self.rejection_sample_method
        if method != "standard" and self.acceptance != "rejection":
            wrong = f'rejection_sample_method {method} needs acceptance "rejection"'
            raise RequestError(wrong, "rejection_sample_method")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            wrong = "max_tokens must be a number from 1; 0 is for prompt_logprobs"
            raise RequestError(wrong, "max_tokens")
        self._check_rule()
        # With these, a request would emit forbidden tokens or continue after the end of its form.
        unfit = ("min_tokens", "ignore_eos", "allowed_token_ids", "bad_words")
        for name in (*(unfit if self.structured_outputs is not None else ()), "synthetic"):
            if self.constraint and getattr(self, name):
                name = "synthetic acceptance" if name == "synthetic" else name
                raise RequestError(f"{self.constraint} can't go with {name}", self.constraint)
        check_synthetic(method, self.synthetic_acceptance_rates, self.synthetic_acceptance_length)

    def _check_rule(self) -> None:
        """Add the defaults of a rule's settings; raise RequestError for a wrong setting."""
        values = self.acceptance_settings or {}
        if self.acceptance not in REQUESTABLE:
            object.__setattr__(
                self, "acceptance_settings", find_rule(self.acceptance).check_settings(values)
            )
        elif values:
            name = next(iter(values))
            raise RequestError(f"{name} is no setting of acceptance {self.acceptance!r}", name)

    def with_seed(self, seed: int) -> Self:
        """Return the same settings with another seed, without checking them again."""
        params = copy(self)
        object.__setattr__(params, "seed", seed)
        return params

    def end_ids(self, eos_token_ids: Sequence[int]) -> frozenset[int]:
        """Return the tokens that end the request. eos_token_ids: the model's own."""
        ends = () if self.ignore_eos else eos_token_ids
        return frozenset(ends) | frozenset(self.stop_token_ids)

    @property
    def constraint(self) -> str:
        """The name of the setting that limits the tokens of each step; "" if there is none."""
        names = ("structured_outputs", "allowed_token_ids", "bad_words")
        return next((name for name in names if getattr(self, name) not in (None, ())), "")

    @property
    def synthetic(self) -> bool:
        """Whether drafts are accepted by chance, so that the text is meaningless."""
        return self.rejection_sample_method == "synthetic"


SETTINGS = declarations(SamplingParams, Setting)
DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


def list_http_settings() -> dict[str, Setting]:
    """Return the settings of HTTP bodies and input files, including those of rules."""
    rules = {name: declared for rule in all_rules() for name, declared in rule.declarations.items()}
    return {name: declared for name, declared in SETTINGS.items() if declared.http} | rules


def to_params_fields(
    settings: Mapping[str, Any], engine: "Manifest | None" = None
) -> dict[str, Any]:
    """Return settings as fields of SamplingParams, a rule's under `acceptance_settings`.

    Settings of None are dropped. Raises RequestError for a rule that the engine of the request has
    and this installation lacks.
    """
    values = {name: value for name, value in settings.items() if value is not None}
    name = values.get("acceptance", "strict")
    if engine is not None and (missing := explain_missing_rule(name, engine)):
        raise RequestError(f"acceptance {name!r}: {missing}", "acceptance")
    rule = {name: values.pop(name) for name in [*values] if name not in SETTINGS}
    if "rejection_sample_method" in values:
        values.setdefault("acceptance", "rejection")
    return values | ({"acceptance_settings": rule} if rule else {})
